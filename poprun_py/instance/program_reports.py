"""Reports to the launcher on the progress, activity, usage, stacks and end of a program."""

import os
import time

from poprun_py.instance import control_protocol, program_environment
from poprun_py.instance.progress_memory import ProgressMemory, unnamed_file
from poprun_py.instance.quick_imports import loads
from poprun_py.process_info import busy_seconds, memory_kills, memory_kills_and_limit

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from resource import struct_rusage
    from typing import Any

    from poprun_py.instance.launcher_channel import LauncherChannel
    from poprun_py.instance.program_activity import ActivitySampler
    from poprun_py.instance.program_process import ProgramProcess


class ProgramReports:
    """Sends reports about one program to the launcher."""

    def __init__(self, program: "ProgramProcess", channel: "LauncherChannel") -> None:
        self.memory = ProgressMemory()
        self.end: dict[str, Any] = {}  # the report of the program's end; empty before it
        self._program = program
        self._channel = channel
        # The number of processes killed at the memory limit before the program started.
        self._oom_kills_before = 0
        # The CPUs that the program may use, and how long each CPU of the machine had been in use
        # when the program started.
        self._cpus: set[int] = set()
        self._busy_before: dict[int, float] = {}
        # The seconds between two reports of progress, and the seconds between two reports of
        # activity while the program makes no steps.
        self._progress_seconds = self._activity_seconds = 0.0
        self._progress_at, self._activity_at = float("inf"), 0.0
        self._sent_progress: list[int] | None = None
        # The number of steps reported so far; None if the launcher does not want every step.
        self._sent_steps: int | None = None
        self._sampler: ActivitySampler | None = None
        self._stacks_file = unnamed_file("poprun-stacks")

    def prepare(self, start: "dict[str, Any]") -> None:
        """Apply the settings of the launcher's GO message before the program starts."""
        if start.get("sample_seconds") is not None:
            self._progress_seconds, self._progress_at = start["sample_seconds"], 0.0
        self._activity_seconds = start.get("look_seconds", 0.0)
        self._sent_steps = 0 if start.get("steps") else None
        os.environ.update(self.memory.variables())
        file, command = self._stacks_file, self._program.command
        os.environ.update(program_environment.stacks_variables(file, command, os.environ))

    def program_started(self) -> None:
        """Read the counters of the machine that later reports are compared with."""
        self._oom_kills_before = memory_kills()
        self._busy_before = busy_seconds()
        self._cpus = os.sched_getaffinity(0)  # the program has the binding of this process

    def close(self) -> None:
        """Close the files that this process shares with the program."""
        self.memory.close()
        os.close(self._stacks_file)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; infinity for never."""
        return self._progress_at

    def on_time(self, now: float) -> None:
        """Report the program's progress, if changed, and its activity, when the reports are due."""
        if not self._program.is_running or now < self._progress_at:
            return
        self._progress_at = now + self._progress_seconds
        if self.memory.counts_steps():
            progress = self.memory.progress()
            if progress != self._sent_progress:
                self._sent_progress = progress
                self._activity_at = now + self._activity_seconds
                self._channel.send(control_protocol.PROGRESS, progress)
        if now >= self._activity_at:
            self._activity_at = now + self._activity_seconds
            self._send_activity()

    def _send_activity(self) -> None:
        if self._sampler is None:
            # These modules are imported when needed, so that the program starts sooner.
            from poprun_py.instance.program_activity import ActivitySampler
            from poprun_py.instance.python_stacks import PythonStacks

            stacks = PythonStacks(self._stacks_file)
            self._sampler = ActivitySampler(self.memory, stacks, self._program.pid)
        sample = self._sampler.sample(self._program.output.num_bytes)
        self._channel.send(control_protocol.ACTIVITY, sample)

    def answer(self, kind: bytes, payload: bytes) -> bool:
        """Answer a request of the launcher; return False if the message is not a request."""
        if kind == control_protocol.DUMP_STACKS:
            from poprun_py.instance.python_stacks import PythonStacks

            stacks = PythonStacks(self._stacks_file).stacks(self._program.pid)
            self._channel.send(control_protocol.STACKS, {"processes": stacks})
        elif kind == control_protocol.OBSERVE:
            self._send_usage()
        elif kind == control_protocol.ASK_CLOCK:
            self._channel.send(control_protocol.CLOCK, [loads(payload), time.monotonic_ns()])
        elif kind == control_protocol.PROPOSE_STOP:
            proposal = loads(payload)
            if proposal:
                self.memory.propose_stop(proposal)
            answer = {"proposal": proposal, "polls": self.memory.polls()}
            self._channel.send(control_protocol.POLLED, answer)
        elif kind == control_protocol.AGREE_STOP:
            self.memory.agree_stop(loads(payload))
        else:
            return False
        return True

    def _send_usage(self) -> None:
        """Report the time per activity and the resource usage of a running program."""
        from poprun_py.instance.program_activity import resource_usage

        if not self._program.is_running:
            return
        usage = resource_usage(self._program.pid)
        self._cpus = set(usage["cpus"]) or self._cpus
        report = {
            **usage,
            "busy_seconds": self._busy_seconds(),
            "progress": self.memory.progress(),
            "has_model": self.memory.has_model(),
            "ledger": self.memory.ledger(),
            "started": self._program.started_ns,
            "now": time.monotonic_ns(),
            **self._new_steps(),
        }
        self._channel.send(control_protocol.OBSERVED, report)

    def send_end(self, usage: "struct_rusage") -> None:
        """Report at once how the program ended, because a failure ends the whole job."""
        memory = self.memory
        is_without_calls = memory.is_automatic() or not memory.counts_steps()
        oom_kills, limit_bytes = memory_kills_and_limit()
        self.end = {
            "code": self._program.exit_code,
            "time_ns": time.time_ns(),
            "max_rss_bytes": usage.ru_maxrss * 1024,
            "memory_limit_bytes": limit_bytes,
            "oom_kills": oom_kills - self._oom_kills_before,
            "progress": memory.progress(),
            # If the program reports no steps itself, the last collective says more about a failure.
            "call": memory.last_collective() if is_without_calls else None,
            "polls": memory.polls(),
            "trained_alone": memory.trained_alone(),
            "has_model": memory.has_model(),
            "started": self._program.started_ns,
            "now": time.monotonic_ns(),
            "ledger": memory.ledger(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "cpus": sorted(self._cpus),
            "busy_seconds": self._busy_seconds(),
            "stopped": self._program.is_stopping,
            "exec_error": self._program.start_error,
        }
        self._channel.send(control_protocol.PROGRAM_ENDED, {**self.end, **self._new_steps()})

    def _busy_seconds(self) -> float:
        """Return how long the program's CPUs were in use, by any process, since its start."""
        now, before = busy_seconds(), self._busy_before
        return sum(now.get(cpu, 0.0) - before.get(cpu, 0.0) for cpu in self._cpus)

    def _new_steps(self) -> "dict[str, Any]":
        """Return the program's steps since the last report, if the launcher wants every step."""
        if self._sent_steps is None:
            return {}
        steps = self.memory.steps(self._sent_steps)
        self._sent_steps = steps["made"]
        return {"steps": steps}
