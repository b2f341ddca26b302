"""The running job, which passes each event to the parts of the launcher that handle it.

The events of a job are frames from wrappers, new and lost connections, signals, answers of hosts,
and time limits that are reached.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from popdist_py.environment import RESUME_EXIT_CODE, counts_optimizers
from popdist_py.errors import counted
from poprun_py.errors import explain_os_error
from poprun_py.instance import control_protocol, process_control
from poprun_py.running.keyboard.keyboard_input import (
    KeyboardInput,
    Suspension,
    open_terminal,
    take_signal,
)
from poprun_py.running.screen.tagged_output import keep_end, tag_width
from poprun_py.running.supervise.activity_monitor import ActivitySample
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.hang_detection import HangCheck, HangDetector
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.job_start import Finding, ProgramStart, StartDiagnosis
from poprun_py.running.supervise.launch_result import Cause, Progress, StackGroup, describe
from poprun_py.running.supervise.launcher_queries import holdings
from poprun_py.running.supervise.mpirun_process import Mpirun, daemon_log_lines
from poprun_py.running.supervise.other_hosts import (
    HostClocks,
    HostWatch,
    NewHosts,
    NextWrappers,
    ReceivedFiles,
    Start,
)
from poprun_py.running.supervise.outcome import ShortageCheck, leftovers_sentence
from poprun_py.running.supervise.shutdown import JobShutdown, TimeLimits
from poprun_py.running.supervise.signal_pipe import SignalPipe
from poprun_py.running.supervise.stacks import StackCollector, groups_text
from poprun_py.terminal import may_colour

if TYPE_CHECKING:
    from poprun_py.running.supervise.launch_result import LaunchResult
    from poprun_py.running.watch.job_observer import JobObserver

Reports = dict[int, dict[str, Any]]


class Timed(Protocol):
    """A part of a running job that acts at certain times."""

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""

    def on_time(self, now: float) -> None:
        """Do the work that is due; called after every event, even before the deadline."""


class RunningJob:
    """Holds the parts of a running job, and passes the events of the job to these parts.

    ``on_started`` is called once, with the start reports of all wrappers, when all programs run.
    ``control`` has the connections to wrappers that the attempt before this one has left running;
    None if mpirun has to start the wrappers. ``on_signal`` is called with each signal to the
    launcher.

    Attributes:
        open_files: The (soft, hard) limit of open files for the programs on this host; None if the
            programs keep mpirun's limit.
        timed: The parts that act at certain times; empty before ``begin``.
    """

    def __init__(
        self,
        job: Job,
        output: InstanceOutput,
        folder: Path,
        on_started: Callable[[Reports], None] | None,
        control: ControlChannel | None = None,
        on_signal: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._on_signal = on_signal
        self.open_files: tuple[int, int] | None = None
        self.mpirun: Mpirun
        self.limits: TimeLimits
        self.diagnosis: StartDiagnosis
        self.observer: JobObserver
        self._new_hosts: NewHosts | None = None
        self._selector: selectors.BaseSelector
        self.timed: list[Timed] = []
        self.began = 0.0  # when the job began; 0 before ``begin``
        self.job = job
        self.output = output
        self.folder = folder
        # Made before mpirun starts, because the kernel may refuse to start a process of mpirun.
        self.shortages = ShortageCheck(folder.parent)
        self._on_started = on_started
        self._end_replies: list[Callable[[str], None]] = []
        self.control = control = control or ControlChannel(job.num_instances, self, job.hosts)
        self._peers = control.peers
        self.shutdown = JobShutdown(job, control, output.log, output.say, self._on_shutdown)
        self._stacks = StackCollector(control)
        self._clocks = HostClocks(job.files.spans, job.hosts.others, control.send_to)
        self._suspension = Suspension(self._stop_launcher)
        limit = job.limits.hang_timeout
        # Without a hang time-out, wrappers send neither progress nor activity.
        self._hangs = HangDetector(float("inf") if limit is None else limit)
        self.keyboard = KeyboardInput(
            job.command.stdin_instance,
            control,
            output,
            self._on_debugger,
            terminal=open_terminal(),
            is_passed_on=job.command.stdin_instance in job.hosts.others,
            is_shown=output.is_terminal,
            tag_width=lambda index: tag_width(index, job.watchers.output),
        )
        self._files = ReceivedFiles(job.files.places, job.hosts.others)
        self._start = ProgramStart(
            job, control, self.shutdown, self._settings_of, self._on_all_told
        )
        self._handlers = self._frame_handlers()

    def begin(
        self, mpirun: Mpirun, selector: selectors.BaseSelector, began: float, start_next: Start
    ) -> None:
        """Make more parts of the job while mpirun starts; ``began`` is the job's start time."""
        # These modules are imported here, so that mpirun starts during the imports.
        from poprun_py.running.watch.job_observer import JobObserver, RoundTimes
        from poprun_py.running.watch.job_view import JobView, LiveView
        from poprun_py.running.watch.records import Recorders

        job, output, control, watchers = self.job, self.output, self.control, self.job.watchers
        self.began, self.mpirun, self._selector = began, mpirun, selector
        live = LiveView(
            panel_size=lambda: output.panel_size,
            show_panel=output.show_panel,
            say=output.say,
            has_colour=may_colour(job.command.environ),
            is_hidden=lambda: self.keyboard.is_debugging,
        )
        self.observer = JobObserver(
            job=JobView(
                run_id=watchers.run_id,
                pid=os.getpid(),
                program=watchers.program,
                counts_optimizers=counts_optimizers(job.command.environ_of(0)),
            ),
            began=began,
            times=RoundTimes.of(
                job.num_instances, is_live=watchers.live, is_recorded=bool(watchers.recorders)
            ),
            ask=lambda index: control.send_to(index, control_protocol.OBSERVE, None),
            tell=lambda straggler: output.say(straggler.sentence),
            show=live.show if watchers.live else None,
            recorders=Recorders(watchers.recorders, output.say),
            epoch=lambda: time.time() - time.monotonic(),
        )
        now = time.monotonic()
        self.limits = TimeLimits(job.limits, self._on_limit, now)
        self.diagnosis = StartDiagnosis(
            job.num_instances, job.hosts.explain_failed_start, self._on_finding, now
        )
        self.timed = [
            self.diagnosis,
            self.limits,
            control,
            self._suspension,
            self.keyboard,
            self._stacks,
            self.observer,
            self.shutdown,
            mpirun,
            output,
        ]
        if job.hosts.changes is not None:
            ahead = NextWrappers(job, start_next, output.log, self.shutdown.use_new_hosts)
            watch = HostWatch(job.hosts.changes, ahead.begin)
            self._new_hosts = NewHosts(watch, control, self.shutdown, self.observer.request)
            self.timed += [watch, ahead]
        if job.limits.hang_timeout is not None:
            check = HangCheck(self._hangs, self._stacks, self.shutdown, mpirun, self._is_blocked)
            self.timed.insert(0, check)

    def begin_next(self) -> None:
        """Go on with wrappers that are kept; start all programs if no wrapper is missing."""
        for index in self._peers:
            self.output.add(index)
        if self.control.is_complete:
            self._begin_programs()

    def _begin_programs(self) -> None:
        self.diagnosis.end()
        self.mpirun.all_connected()
        self._start.begin()

    def _is_blocked(self) -> bool:
        """Tell whether the reader of the launcher's output or a debugger blocks instances."""
        return self.output.is_full or self.keyboard.is_debugging

    @property
    def is_any_running(self) -> bool:
        """Whether any connected instance has not reported its end yet."""
        return any(peer.instance_end is None for peer in self._peers.values())

    # --- connections: control_channel.ChannelEvents ---------------------------------------

    def connected(self, peer: Peer) -> None:
        """Handle a wrapper that has connected; after the last wrapper, start all programs."""
        self.output.add(peer.index)
        if self.shutdown.asked_at is not None:
            self.control.send_to(peer.index, control_protocol.STOP, [0, signal.SIGTERM])
        elif self.control.is_complete:
            self._begin_programs()

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame from an instance's wrapper; ignore frames of unknown kinds."""
        if handler := self._handlers.get(kind):
            handler(peer, value)

    def disconnected(self, peer: Peer) -> None:
        """Handle a closed connection; the wrapper was killed unless its instance has ended."""
        if peer.instance_end is not None:
            return
        program = peer.started.get("pid", 0)
        if program and self.job.hosts.listen is None:
            process_control.signal_group(program, signal.SIGKILL)
        lost = {
            "code": -signal.SIGKILL,
            "time_ns": time.time_ns() - peer.clock_offset_ns,
            "stopped": self.shutdown.asked_at is not None,
            "lost": True,
        }
        self._on_instance_end(peer, peer.program_end or lost)
        self._stacks.take(peer.index, None)

    def accept_failed(self, error: OSError) -> None:
        """End the job if some of its instances can no longer connect."""
        connected = f"{len(self._peers)} of {counted(self.job.num_instances, 'instance')} connected"
        problem = explain_os_error(error, f"{connected}, and no more instances can connect")
        if self.control.is_complete:
            self.output.log(problem)
        else:
            self.shutdown.end(Cause.REFUSED, problem)

    def stranger_refused(self, sentence: str) -> None:
        """Warn of a connection by a process that does not belong to the job."""
        self.output.say(sentence)

    def inspected(self, want: Any, answer: Callable[[str], None]) -> None:
        """Answer a process of this host that inspects the job."""
        now = time.monotonic()
        if want == "stacks":
            self._stacks.collect(lambda groups: answer(groups_text(groups)), now)
        elif want == "status":
            labels = self.job.watchers.labels
            self.observer.request(lambda view: answer(view.json_text(labels)), now)
        elif want == "holdings":
            answer(json.dumps(holdings(self.job, self._peers)))
        elif want == "end":
            self._end_replies.append(answer)
        elif isinstance(want, dict) and self._new_hosts is not None:
            self._new_hosts.add(want, answer, now)
        else:
            answer("")

    def answer_end(self, result: LaunchResult) -> None:
        """Send the result of the job to the processes that have asked for its end."""
        end = {
            "exit_code": result.exit_code,
            "reason": result.explanation,
            "may_restart": result.may_restart,
        }
        for answer in self._end_replies:
            answer(json.dumps(end))

    # --- frames ---------------------------------------------------------------------------

    def _frame_handlers(self) -> dict[bytes, Callable[[Peer, Any], None]]:
        output, keyboard = self.output, self.keyboard

        def keyboard_handler(kind: bytes) -> Callable[[Peer, Any], None]:
            return lambda peer, value: keyboard.received(peer.index, kind, value)

        return {
            control_protocol.STDOUT: output.feed_stdout,
            control_protocol.STDERR: self._on_stderr,
            control_protocol.FILE: lambda peer, value: self._files.take(peer.index, value),
            control_protocol.LEASED: self._start.on_lease,
            control_protocol.INPUT_FILE: self._start.on_file_stored,
            control_protocol.CLOCK: lambda peer, value: self._clocks.take(peer.index, *value),
            control_protocol.STARTED: self._on_program_start,
            control_protocol.PROGRESS: lambda peer, value: self._hangs.record_progress(
                peer.index, Progress(*value), time.monotonic()
            ),
            control_protocol.ACTIVITY: lambda peer, value: self._hangs.activity.record(
                peer.index, ActivitySample.of(value), time.monotonic()
            ),
            control_protocol.OBSERVED: self._on_observed,
            control_protocol.POLLED: lambda peer, value: self.shutdown.on_answer(
                peer.index, value["proposal"], value["polls"]
            ),
            control_protocol.PAUSED: lambda peer, _: self._suspension.stopped(peer.index),
            control_protocol.STACKS: lambda peer, value: self._stacks.take(
                peer.index, value["processes"]
            ),
            control_protocol.STOP_SIGNAL: self._on_stop_signal,
            control_protocol.LEFTOVERS: lambda peer, killed: output.say(
                leftovers_sentence(peer.index, killed)
            ),
            control_protocol.STARTED_MPI: lambda peer, _: setattr(peer, "started_mpi", True),
            control_protocol.PROGRAM_ENDED: self._on_program_end,
            control_protocol.INSTANCE_ENDED: self._on_instance_end,
            control_protocol.KEYS_READ: keyboard_handler(control_protocol.KEYS_READ),
            control_protocol.UNREAD: keyboard_handler(control_protocol.UNREAD),
            control_protocol.TERMINAL_MODES: keyboard_handler(control_protocol.TERMINAL_MODES),
            control_protocol.DEBUGGER: keyboard_handler(control_protocol.DEBUGGER),
        }

    def _on_stderr(self, peer: Peer, data: bytes) -> None:
        peer.tail = keep_end(peer.tail, data)
        self.output.feed_stderr(peer, data)

    def _on_program_start(self, peer: Peer, report: dict[str, Any]) -> None:
        peer.started, now = report, time.monotonic()
        for line in daemon_log_lines(peer.host, report):
            self.output.log(line)
        self._hangs.activity.add(peer.index, now)
        self.observer.started(peer.index, peer.host, report["pid"], now)
        peers = self._peers.values()
        if self._on_started is not None and all(each.started for each in peers):
            self._on_started({each.index: each.started for each in peers})

    def _on_observed(self, peer: Peer, value: dict[str, Any]) -> None:
        peer.has_model = value.get("has_model", False)
        self.observer.observed(peer.index, value, time.monotonic())

    def _on_stop_signal(self, peer: Peer, _: Any) -> None:
        if peer.program_end is None:
            self.shutdown.end(Cause.MPIRUN_ENDED, "mpirun ended the instances")

    def _on_program_end(self, peer: Peer, end: dict[str, Any]) -> None:
        """Note the end of a program; the first program that fails ends the job."""
        if peer.program_end is not None:
            return
        peer.program_end = end
        now, code = time.monotonic(), end["code"]
        self._hangs.remove(peer.index, now)
        self.observer.ended(peer.index, end, now)
        self.shutdown.on_program_end(peer.index)
        self._suspension.stopped(peer.index)
        self.keyboard.ended(peer.index)
        if peer.connection.is_open:
            self._clocks.ask(peer.index)
        if code == RESUME_EXIT_CODE:
            self.limits.on_checkpoint_end(peer.index, now)
        elif code != 0:
            if self.shutdown.asked_at is None and peer.host == socket.gethostname():
                self.shortages.on_failure(code)
            self.shutdown.end(Cause.FAILED, f"instance {peer.index} ended with {describe(code)}")

    def _on_instance_end(self, peer: Peer, end: dict[str, Any]) -> None:
        """Note that all processes of an instance have ended and all its output has arrived."""
        self._on_program_end(peer, end)
        peer.instance_end = end
        self.output.finish(peer.index)

    # --- the start of the programs --------------------------------------------------------

    def _settings_of(self, peer: Peer) -> dict[str, Any]:
        settings: dict[str, Any] = {"sample_seconds": None}
        if self.job.limits.hang_timeout is not None:
            settings["sample_seconds"] = self._hangs.check_interval
            settings["look_seconds"] = self._hangs.activity.sample_interval
        settings["steps"] = bool(self.job.watchers.recorders)  # whether wrappers report each step
        settings["grace_seconds"] = self.job.limits.grace
        if self.open_files is not None and peer.host == socket.gethostname():
            settings["open_files"] = self.open_files
        return {**settings, **self.keyboard.start_of(peer.index)}

    def _on_all_told(self) -> None:
        """Begin to compare clocks and to pass on input, as all programs are starting."""
        for index in self._peers:
            self._clocks.ask(index)
        self.keyboard.begin(self._selector)
        count = len(self._peers)
        self.output.log(f"{counted(count, 'instance')} {'starts' if count == 1 else 'start'}")

    def _on_finding(self, finding: Finding) -> None:
        sentence = finding.sentence(len(self._peers), self.job.num_instances, self.mpirun.output)
        if finding.is_reason:
            self.shutdown.end(Cause.REFUSED, sentence)
        else:
            self.output.say(f"warning: {sentence}")

    # --- signals and pauses ---------------------------------------------------------------

    def on_signals(self, signals: SignalPipe, _: int) -> None:
        """Handle the signals that the launcher has received."""
        for number, reason in signals.take():
            if number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGQUIT:
                self.keyboard.let_go()
                take_signal(number)
            elif number == signal.SIGWINCH:
                self.output.resized()
                self.keyboard.resized()
                self.observer.show_again(time.monotonic())
            else:
                if number == signal.SIGINT:
                    self.output.shorten_interrupts()
                self._on_signal(number)
                self.shutdown.on_signal(number, reason)

    def _suspend(self) -> None:
        """After Ctrl-Z, stop the programs and then the launcher.

        The programs of a job that is starting or ending are not stopped.
        """
        if self._suspension.is_asked:
            return
        running = [p.index for p in self._peers.values() if p.program_end is None]
        if not self.control.is_complete or self.shutdown.asked_at is not None:
            running = []
        for index in running:
            self.control.send_to(index, control_protocol.PAUSE, True)
        self._suspension.begin(running, time.monotonic())

    def _stop_launcher(self) -> None:
        """Stop the launcher until the shell continues the launcher."""
        self.limits.pause(time.monotonic())
        self.output.on_time(time.monotonic(), wait_seconds=0.1)
        self.output.suspend()
        self.keyboard.let_go()
        take_signal(signal.SIGTSTP)
        self._resume_limits()
        self.keyboard.on_time(time.monotonic())
        self.output.redraw()
        self.observer.show_again(time.monotonic())
        self.control.broadcast(control_protocol.PAUSE, False)

    def _on_debugger(self, instance: int | None) -> None:
        """Pause all limits while ``instance`` is in the debugger; None resumes the limits."""
        if instance is None:
            self._resume_limits()
        else:
            self.limits.pause(time.monotonic())
            self.output.say(
                f"instance {instance} is in the debugger: --hang-timeout and --timeout pause"
            )

    def _resume_limits(self) -> None:
        now = time.monotonic()
        self._hangs.reset_timers(now)
        if not self.keyboard.is_debugging:
            self.limits.resume(now)

    # --- ending ---------------------------------------------------------------------------

    def _on_limit(self, cause: Cause, reason: str) -> None:
        """End a job that has reached a limit; for its time limit, collect all stacks first."""
        if cause is not Cause.TIME_LIMIT:
            self.shutdown.end(cause, reason)
            return

        def end(groups: tuple[StackGroup, ...]) -> None:
            if self.shutdown.stop is not None:
                self.shutdown.end_with_stacks(self.shutdown.stop.hung, groups)

        self.shutdown.decide(cause, reason)
        self._stacks.collect(end, time.monotonic())

    def end_questions(self) -> None:
        """End the child processes that ask hosts."""
        self.diagnosis.end()
        if self._new_hosts is not None:
            self._new_hosts.end()

    def _on_shutdown(self, now: float) -> None:
        self.output.stopped_at = now
        self.end_questions()
        if not self.control.is_complete:
            # mpirun may wait for a host that was lost. No program has started, so no program needs
            # time to save a checkpoint.
            self.mpirun.stop(now)
