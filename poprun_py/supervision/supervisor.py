"""Runs a launch: starts the command, talks to every instance's wrapper, ends all in good order.

Knows no MPI and no topology: it gets a command, what to tell each instance, and limits. The only
module that starts processes for the job, catches signals and waits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poprun_py.errors import StartError
from poprun_py.instance import processes, protocol
from poprun_py.output.screen import OutputStream, keep_end
from poprun_py.supervision import outcome, stacks
from poprun_py.supervision.alarms import Alarms
from poprun_py.supervision.control_channel import Control, Peer
from poprun_py.supervision.hang_detection import HangWatch
from poprun_py.supervision.instance_output import Display
from poprun_py.supervision.job import (
    RESUME_EXIT_CODE,
    InstanceResult,
    Job,
    LaunchResult,
    StackGroup,
    describe,
)
from poprun_py.supervision.mpirun import Mpirun
from poprun_py.supervision.stack_requests import Dumps
from poprun_py.supervision.startup import Start
from poprun_py.supervision.stop_request import StopRequest

__all__ = ["InstanceResult", "Job", "LaunchResult", "supervise"]

# Between the first sign of trouble in mpirun and giving up on instances that say nothing.
_SILENCE_SECONDS = 10.0
# Between asking mpirun to end and killing it while it is still starting.
_START_END_SECONDS = 2.0
# A launcher that has not looked for so long was stopped itself: what it missed is no silence.
_LATE_SECONDS = 1.0
# The longest path of a Unix socket is 107 bytes.
_LONGEST_FOLDER = 60
_PARENT_ENDED = signal.SIGRTMAX - 4

Started = Callable[[dict[int, dict[str, Any]]], None]


def supervise(
    job: Job,
    *,
    log: Callable[[str], None],
    on_started: Started | None = None,
    explain: Callable[[], None] | None = None,
    descriptors: tuple[int, int] = (1, 2),
) -> LaunchResult:
    """Run ``job`` to its end and return how it ended; nothing of it is left running.

    Args:
        job: what to run.
        log: takes a line of the launcher's own log.
        on_started: called once with what every wrapper reported after starting its program.
        explain: asks why a job does not start: raises StartError with the reason, if there is one.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        StartError: the job could not start.
    """
    folder = _private_folder(stacks.run_folder_prefix())
    try:
        supervisor = _Supervisor(job, folder, log, on_started, explain, descriptors)
        try:
            with supervisor:
                return supervisor.run()
        except StartError:
            if explain is not None and not supervisor.refusal:
                explain()
            raise
        except OSError as error:
            raise StartError(_trouble(error, "the launcher cannot run the job")) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _private_folder(prefix: str) -> Path:
    """Make a folder for temporary files that only this user can enter.

    What tempfile does, without its imports: they take longer than a launch may add to mpirun.

    Raises:
        StartError: no such folder can be made.
    """
    bases = [os.environ.get("TMPDIR", ""), "/tmp"]
    for base in (base for base in bases if base and len(base) < _LONGEST_FOLDER):
        folder = Path(base, f"{prefix}{os.urandom(6).hex()}").absolute()
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
            return folder
    raise StartError(f"no folder for temporary files can be made in {bases[0] or '/tmp'}")


def _trouble(error: OSError, what: str) -> str:
    """Return a line about what the system refused the launcher, with what to do."""
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if error.errno == errno.EMFILE:
        # The soft limit is the hard one already.
        return (
            f"{what} ({said}): raise the hard limit of open files (ulimit -n N as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    if error.errno == errno.ENFILE:
        return f"{what} ({said}): raise the limit of the whole machine (sysctl fs.file-max)"
    return f"{what} ({said})"


class _Supervisor:
    """One run of one job. Everything happens in ``run``, in one thread."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        log: Callable[[str], None],
        on_started: Started | None,
        explain: Callable[[], None] | None,
        descriptors: tuple[int, int],
    ) -> None:
        self.job = job
        self.on_started = on_started
        self._folder = folder
        self.display = Display(job, descriptors, log)
        self.log = self.display.log
        self.control = Control(len(job.variables), self)
        self.peers = self.control.peers
        self.alarms = Alarms()
        self.dumps = Dumps(self.control)
        self.start = Start(job.hosts, self.control, self.alarms, explain, self._refuse)
        self.stop_request = StopRequest(
            self.control, self.alarms, job.grace_seconds, self._pass_on, self.log
        )
        self.mpirun: Mpirun | None = None
        self.ended_by = 0  # signal that the launcher was sent
        self.stop_reason = ""
        self.refusal = ""  # what keeps the job from starting
        self.stopped_at: float | None = None
        self.timed_out = False
        self.released = False
        self.watch = HangWatch(job.hang_timeout) if job.hang_timeout is not None else None
        self._looked_at = time.monotonic()
        self.hung: tuple[int, ...] = ()
        self.stacks: tuple[StackGroup, ...] = ()

    # --- in and out -----------------------------------------------------------------------

    def __enter__(self) -> _Supervisor:
        """Acquire what the run needs; what was acquired is given back also if the rest fails."""
        with contextlib.ExitStack() as resources:
            self.open_files = processes.raise_open_files()
            resources.callback(processes.set_open_files, self.open_files)
            self._wake_read, wake_write = os.pipe()
            for end in (self._wake_read, wake_write):
                resources.callback(os.close, end)
                os.set_blocking(end, False)
            self.selector = resources.enter_context(selectors.DefaultSelector())
            self.selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
            resources.callback(self.display.close)
            resources.callback(self.control.close)
            self.control.open(self.selector, self._folder, self.job.listen)
            # Orphans of a killed wrapper become the launcher's children, and are ended at the end.
            processes.become_subreaper()
            self._catch_signals(resources, wake_write)
            resources.callback(self._end_mpirun)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _catch_signals(self, resources: contextlib.ExitStack, wake_write: int) -> None:
        numbers: list[int] = [
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGCHLD,
        ]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._parent = processes.tell_when_parent_ends(_PARENT_ENDED)
        if self._parent is not None:
            numbers.append(_PARENT_ENDED)
        old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        resources.callback(signal.set_wakeup_fd, old_wake)
        for number in numbers:
            old_handler = signal.signal(number, lambda *_: None)
            resources.callback(signal.signal, number, old_handler)

    def _end_mpirun(self) -> None:
        if self.mpirun is not None:
            self.mpirun.end()

    def run(self) -> LaunchResult:
        """Start the command and serve it until everything has ended."""
        began = time.monotonic()
        address, token = self.control.address, self.control.token
        environ = {**self.job.environ, "POPRUN_CONTROL": address, "POPRUN_TOKEN": token}
        self.mpirun = Mpirun(
            self.job.command, environ, address, self.selector, self.log, self.open_files
        )
        if self.job.timeout_seconds is not None:
            left = self.job.timeout_seconds - self.job.spent_seconds
            self.alarms.set("time limit", left, self._on_time_limit)
        self.start.look_later()
        while not self._finished(self.mpirun):
            for key, events in self.selector.select(self._patience()):
                key.data(key.fileobj, events)
            if self.mpirun.has_just_ended() and self._connected():
                self.stop(f"mpirun ended with {describe(self.mpirun.code)}")
            self._look_around(time.monotonic())
        for peer in self.peers.values():
            self.display.finish(peer)
        self._drain()
        return self._result(self.mpirun, time.monotonic() - began)

    # --- instances: control.Listener ------------------------------------------------------

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return stdout and stderr of a new instance."""
        return self.display.make_streams(index)

    def joined(self, peer: Peer) -> None:
        """Once every wrapper is there, let all programs start at once."""
        if self.stop_reason:
            self.control.send(peer, protocol.STOP, 0)
        if self.stop_reason or not self.control.is_complete or not self.start.is_as_planned():
            return
        port = str(self.peers[0].port)
        sample = self.watch.sample_seconds if self.watch is not None else None
        for index, each in self.peers.items():
            variables = {"MASTER_PORT": port, **self.job.variables[index]}
            self.control.send(each, protocol.GO, {"variables": variables, "sample_seconds": sample})
        self.log(f"{len(self.peers)} instances start")

    def received(self, peer: Peer, kind: bytes, payload: bytes) -> None:
        """Do what a frame of an instance asks for."""
        if kind == protocol.STDOUT:
            self.display.feed_stdout(peer, payload)
        elif kind == protocol.STDERR:
            peer.tail = keep_end(peer.tail, payload)
            self.display.feed_stderr(peer, payload)
        else:
            self._on_message(peer, kind, json.loads(payload))

    def _on_message(self, peer: Peer, kind: bytes, value: Any) -> None:
        if kind == protocol.STARTED:
            peer.started = value
            if self.on_started is not None and all(p.started for p in self.peers.values()):
                self.on_started({p.index: p.started for p in self.peers.values()})
        elif kind == protocol.BEAT and self.watch is not None:
            self.watch.beat(peer.index, value, time.monotonic())
        elif kind == protocol.POLLED:
            self.stop_request.answer(peer.index, value["proposal"], value["polls"])
        elif kind == protocol.STACKS:
            self.dumps.take(peer.index, value["processes"])
        elif kind == protocol.DIED:
            self._died(peer, value)
        elif kind == protocol.EXIT:
            self._left(peer, value)

    def lost(self, peer: Peer) -> None:
        """The connection to a wrapper ended: normal after its report, else the wrapper died."""
        if peer.outcome is not None:
            return
        program = peer.started.get("pid", 0)
        if program and self.job.listen is None:
            processes.signal_group(program, signal.SIGKILL)
        gone = {
            "code": -signal.SIGKILL,
            "time_ns": time.time_ns() - peer.clock_offset_ns,
            "stopped": bool(self.stop_reason),
            "lost": True,
        }
        self._left(peer, peer.died or gone)
        self.dumps.take(peer.index, None)

    def closed(self, error: OSError) -> None:
        """Nobody else can connect: a job that is not complete cannot start."""
        connected = f"{len(self.peers)} of {len(self.job.variables)} instances are connected"
        problem = _trouble(error, f"{connected}, no more can be")
        if self.control.is_complete:
            self.log(problem)
        else:
            self._refuse(problem)

    def inspected(self, want: str, answer: Callable[[str], None]) -> None:
        """Somebody on this host asks for the stacks of the running job."""
        if want != "stacks":
            answer("")
            return
        self.dumps.start(lambda found: answer(stacks.render_groups(stacks.group_stacks(found))))

    def _died(self, peer: Peer, end: dict[str, Any]) -> None:
        """A program ended; the first failure ends all the others."""
        if peer.died is not None:
            return
        peer.died = end
        if self.watch is not None:
            self.watch.ended(peer.index)
        self.stop_request.leave(peer.index)
        if end["code"] == RESUME_EXIT_CODE:
            self.alarms.set(
                "stragglers",
                self.job.grace_seconds,
                lambda: self.stop(f"instance {peer.index} ended at a checkpoint, others did not"),
            )
        elif end["code"] != 0 and not self.stop_reason:
            self.stop(f"instance {peer.index} ended with {describe(end['code'])}")

    def _left(self, peer: Peer, end: dict[str, Any]) -> None:
        """Nothing is left of a program, and its output is here."""
        self._died(peer, end)
        peer.outcome = end
        self.display.finish(peer)

    # --- signals --------------------------------------------------------------------------

    def _on_wake(self, descriptor: Any, _: int) -> None:
        for number in os.read(descriptor, 512):
            # The death of the one thread of the parent that started us is not its end.
            orphaned = number == _PARENT_ENDED and os.getppid() != self._parent
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) or orphaned:
                self._on_end_signal(signal.SIGHUP if orphaned else number)
            elif number == signal.SIGUSR1 and not self.stop_reason:
                self.stop_request.begin(number)
            elif number in (signal.SIGUSR1, signal.SIGUSR2):
                self._pass_on(number)

    def _on_end_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.ended_by:
            self.log(f"{name} again: killing all instances")
            self.control.broadcast(protocol.STOP, 0)
            self._wake_wrappers()
            return
        self.ended_by = number
        if number == signal.SIGINT:
            self.control.broadcast(protocol.SIGNAL, int(number))
            self.stop("SIGINT received")
        elif not self.stop_reason:
            self.stop_request.begin(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        """Deliver a signal of the launcher to programs that were not asked in another way."""
        if number == signal.SIGTERM:
            self.stop("SIGTERM received")
        else:
            self.control.broadcast(protocol.SIGNAL, int(number))

    # --- ending ---------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask every instance to end, once; what is left after the grace time is killed."""
        if self.stop_reason:
            return
        self.stop_reason = reason
        self.stopped_at = time.monotonic()
        self.log(f"{reason}: stopping the other instances")
        self.control.broadcast(protocol.STOP, self.job.grace_seconds)
        self._wake_wrappers()
        self.alarms.clear("start")
        if not self.control.is_complete and self.mpirun is not None:
            # It may wait for a host that is gone. No program has started: there is nothing to save.
            self.mpirun.signal(signal.SIGTERM)
            self.alarms.set("mpirun", _START_END_SECONDS, self._kill_mpirun)

    def _wake_wrappers(self) -> None:
        """Let wrappers of this host go on that were stopped (SIGSTOP): they end the programs."""
        if self.job.listen is None:
            for peer in self.peers.values():
                if peer.outcome is None:
                    processes.signal_process(peer.pid, signal.SIGCONT)

    def _refuse(self, problem: str) -> None:
        """End a job that cannot start."""
        self.refusal = problem
        self.stop("the job cannot start")

    def _on_time_limit(self) -> None:
        self.timed_out = True
        self._stop_with_stacks(f"the time limit of {self.job.timeout_seconds:g} s is over")

    def _stop_with_stacks(self, reason: str) -> None:
        """Learn what every instance is doing, then end them all."""

        def stop(found: dict[int, Any]) -> None:
            self.stacks = stacks.group_stacks(found)
            if self.hung and self.watch is not None:
                self.hung = stacks.missing_instances(self.hung, self.watch.steps(), self.stacks)
            self.stop(reason)

        self.dumps.start(stop)

    def _finished(self, mpirun: Mpirun) -> bool:
        """Tell whether all instances have reported and mpirun has ended."""
        if self.control.is_complete and not self._connected():
            if not self.released:
                self.released = True
                self.control.broadcast(protocol.BYE, None)
                # A daemon on a host that is gone never answers mpirun, which waits for it.
                is_lost = any((p.outcome or {}).get("lost") for p in self.peers.values())
                self.alarms.set("mpirun", 1.0 if is_lost else _SILENCE_SECONDS, self._kill_mpirun)
            return mpirun.ended_at is not None
        return mpirun.ended_at is not None and (
            not self._connected() or time.monotonic() > mpirun.ended_at + _SILENCE_SECONDS
        )

    def _kill_mpirun(self) -> None:
        """End mpirun, which has nothing left to do; its daemons follow."""
        if self.mpirun is not None and self.mpirun.ended_at is None:
            self.log("mpirun does not end by itself: killing it")
            self.mpirun.signal(signal.SIGKILL)

    def _connected(self) -> bool:
        return any(p.outcome is None for p in self.peers.values())

    # --- time -----------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        """Do what is due without any event."""
        self.alarms.ring(now)
        self.dumps.look(now)
        if self.watch is not None and not self.hung and not self.stop_reason:
            if self.display.is_full or now > self._looked_at + _LATE_SECONDS:
                self.watch.excuse(now)
            self.hung = self.watch.hung(now)
            if self.hung:
                silence = max(self.watch.silence(i, now) for i in self.hung)
                self._stop_with_stacks(f"no step for {silence:.1f} s")
        self._looked_at = now
        self.display.move(self.peers.values(), self.stopped_at)
        self.control.pause(self.display.is_full)

    def _patience(self) -> float:
        """Return how long to wait for an event."""
        now = time.monotonic()
        return min(
            0.2 if self.stop_reason or self.released else 1.0,
            self.watch.sample_seconds if self.watch is not None else 1.0,
            self.alarms.wait_limit(now),
            self.dumps.wait_limit(now),
            self.display.wait_limit(self.peers.values()),
        )

    # --- the result -----------------------------------------------------------------------

    def _drain(self) -> None:
        """Write the last of the output, for as long as the reader takes it or nobody says stop."""
        while not self.display.is_written:
            for key, events in self.selector.select(0):
                if key.fileobj == self._wake_read:
                    key.data(key.fileobj, events)
            self.alarms.ring(time.monotonic())
            if self.ended_by or self.timed_out:
                self.stopped_at = self.stopped_at or time.monotonic()
            self.display.move(self.peers.values(), self.stopped_at, patience=0.1)

    def _result(self, mpirun: Mpirun, seconds: float) -> LaunchResult:
        for line in mpirun.words.splitlines():
            self.log(f"mpirun: {line}")
        return outcome.judge(
            outcome.Ending(
                job=self.job,
                peers=self.peers,
                last_word=self.display.last_word,
                seconds=seconds,
                reason=self.stop_reason,
                ended_by=self.ended_by,
                timed_out=self.timed_out,
                hung=self.hung,
                stacks=self.stacks,
                mpirun_code=mpirun.code,
                mpirun_text=mpirun.words,
                refusal=self.refusal,
            )
        )
