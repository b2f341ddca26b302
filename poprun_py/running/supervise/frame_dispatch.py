"""Dispatch of the instances' frames to the parts of the supervisor that need them."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py.instance import control_protocol, process_control
from poprun_py.running.keyboard.keyboard_input import KeyboardInput
from poprun_py.running.keyboard.suspension import Suspension
from poprun_py.running.screen.tagged_output import keep_end
from poprun_py.running.supervise.activity_monitor import ActivitySample
from poprun_py.running.supervise.control_channel import ControlChannel, Peer
from poprun_py.running.supervise.file_transfer import FileTransfer
from poprun_py.running.supervise.hang_detection import HangDetector
from poprun_py.running.supervise.host_clocks import HostClocks
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job import Cause, Job, Progress, describe
from poprun_py.running.supervise.job_start import ProgramStart
from poprun_py.running.supervise.mpirun_process import daemon_log_lines
from poprun_py.running.supervise.outcome import leftovers_sentence
from poprun_py.running.supervise.resource_shortage import ShortageCheck
from poprun_py.running.supervise.shutdown import JobShutdown
from poprun_py.running.supervise.stacks import StackCollector
from poprun_py.running.supervise.time_limits import TimeLimits

if TYPE_CHECKING:
    from poprun_py.running.watch.job_observer import JobObserver

Reports = dict[int, dict[str, Any]]
_Handler = Callable[[Peer, Any], None]


@dataclass(kw_only=True, eq=False)
class FrameDispatcher:
    """Hands the frames of one job to the parts of its supervisor.

    Attributes:
        on_started: Called once, when all programs run, with the reports of their wrappers.
        hangs: Detects hangs; None if no hangs are to be detected.
        observer: Observes the instances; None until mpirun has been started.
    """

    job: Job
    on_started: Callable[[Reports], None] | None
    output: InstanceOutput
    control: ControlChannel
    shutdown: JobShutdown
    limits: TimeLimits
    shortages: ShortageCheck
    stacks: StackCollector
    files: FileTransfer
    start: ProgramStart
    clocks: HostClocks
    hangs: HangDetector | None
    suspension: Suspension
    keyboard: KeyboardInput
    observer: JobObserver | None = None

    def __post_init__(self) -> None:
        self._handlers: dict[bytes, _Handler] = {
            control_protocol.STDOUT: self.output.feed_stdout,
            control_protocol.STDERR: self._on_stderr,
            control_protocol.FILE: lambda peer, value: self.files.take(peer.index, value),
            control_protocol.LEASED: self.start.on_lease,
            control_protocol.INPUT_FILE: self.start.on_file_stored,
            control_protocol.CLOCK: lambda peer, value: self.clocks.take(peer.index, *value),
            control_protocol.STARTED: self._on_program_start,
            control_protocol.PROGRESS: self._on_progress,
            control_protocol.ACTIVITY: self._on_activity,
            control_protocol.OBSERVED: self._on_observed,
            control_protocol.POLLED: self._on_polled,
            control_protocol.PAUSED: lambda peer, _: self.suspension.stopped(peer.index),
            control_protocol.STACKS: self._on_stacks,
            control_protocol.STOP_SIGNAL: self._on_stop_signal,
            control_protocol.LEFTOVERS: self._on_leftovers,
            control_protocol.PROGRAM_ENDED: self._on_program_end,
            control_protocol.INSTANCE_ENDED: self._on_instance_end,
            **{
                kind: self._keyboard_handler(kind)
                for kind in (
                    control_protocol.KEYS_READ,
                    control_protocol.UNREAD,
                    control_protocol.TERMINAL_MODES,
                    control_protocol.DEBUGGER,
                )
            },
        }

    def dispatch(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame from an instance's wrapper; ignore frames of unknown kinds."""
        if handler := self._handlers.get(kind):
            handler(peer, value)

    def on_disconnect(self, peer: Peer) -> None:
        """Handle a closed connection; a wrapper that has not reported an end was killed."""
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
        self.stacks.take(peer.index, None)

    def _keyboard_handler(self, kind: bytes) -> _Handler:
        return lambda peer, value: self.keyboard.received(peer.index, kind, value)

    def _on_stderr(self, peer: Peer, data: bytes) -> None:
        peer.tail = keep_end(peer.tail, data)
        self.output.feed_stderr(peer, data)

    def _on_program_start(self, peer: Peer, report: dict[str, Any]) -> None:
        peer.started, now = report, time.monotonic()
        for line in daemon_log_lines(peer.host, report):
            self.output.log(line)
        if self.hangs is not None:
            self.hangs.activity.add(peer.index, now)
        if self.observer is not None:
            self.observer.started(peer.index, peer.host, report["pid"], now)
        peers = self.control.peers.values()
        if self.on_started is not None and all(each.started for each in peers):
            self.on_started({each.index: each.started for each in peers})

    def _on_progress(self, peer: Peer, value: list[int]) -> None:
        if self.hangs is not None:
            self.hangs.record_progress(peer.index, Progress(*value), time.monotonic())

    def _on_activity(self, peer: Peer, value: dict[str, Any]) -> None:
        if self.hangs is not None:
            sample = ActivitySample.of(value)
            self.hangs.activity.record(peer.index, sample, time.monotonic())

    def _on_observed(self, peer: Peer, value: Any) -> None:
        if self.observer is not None:
            self.observer.observed(peer.index, value, time.monotonic())

    def _on_polled(self, peer: Peer, value: dict[str, int]) -> None:
        self.shutdown.on_answer(peer.index, value["proposal"], value["polls"])

    def _on_stacks(self, peer: Peer, value: dict[str, Any]) -> None:
        self.stacks.take(peer.index, value["processes"])

    def _on_stop_signal(self, peer: Peer, _: Any) -> None:
        if peer.program_end is None:
            self.shutdown.end(Cause.MPIRUN_ENDED, "mpirun ended the instances")

    def _on_leftovers(self, peer: Peer, killed: list[tuple[int, str]]) -> None:
        self.output.say(leftovers_sentence(peer.index, killed))

    def _on_program_end(self, peer: Peer, end: dict[str, Any]) -> None:
        """Note the end of a program; the first program that fails ends the job."""
        if peer.program_end is not None:
            return
        peer.program_end = end
        now, code = time.monotonic(), end["code"]
        if self.hangs is not None:
            self.hangs.remove(peer.index, now)
        if self.observer is not None:
            self.observer.ended(peer.index, end, now)
        self.shutdown.on_program_end(peer.index)
        self.suspension.stopped(peer.index)
        self.keyboard.ended(peer.index)
        if peer.is_open:
            self.clocks.ask(peer.index)
        if code == RESUME_EXIT_CODE:
            self.limits.on_checkpoint_end(peer.index, now)
        elif code != 0:
            if self.shutdown.asked_at is None and peer.host == socket.gethostname():
                self.shortages.on_failure(code)
            self.shutdown.end(Cause.FAILED, f"instance {peer.index} ended with {describe(code)}")

    def _on_instance_end(self, peer: Peer, end: dict[str, Any]) -> None:
        """Note that no process of a program is left, and that all its output has arrived."""
        self._on_program_end(peer, end)
        peer.instance_end = end
        self.output.finish(peer)
