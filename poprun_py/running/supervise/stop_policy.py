"""How a job is ended: why, and the steps from an agreement over a request to force.

Programs that ask whether to stop agree on a step. To all others, their wrappers send one signal
(SIGINT after Ctrl-C, else SIGTERM) and, after the whole grace time, SIGKILL. The wrappers measure
that time. A second signal to the launcher ends the wait.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from poprun_py.instance import control_protocol, process_control
from poprun_py.instance.process_control import GracefulStop
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.job import Cause, Job, StackGroup, Stop
from poprun_py.running.supervise.stop_agreement import Move, StopRequest

# A wrapper kills what is left after the grace time, and tells, unless it was stopped itself.
_FOLLOW_SECONDS = 5.0
# One request may come as several signals: Ctrl-C from the terminal and from a parent process that
# passes it on, SIGTERM from timeout(1) to its child and to its group.
_SAME_REQUEST_SECONDS = 0.3


class StopPolicy:
    """The end of one job: its cause, and what has been done about it.

    Args:
        job: Says how long programs may take, and whether all run on this machine.
        control: The connections to the instances.
        log: Takes a line of the launcher's own log.
        say: Takes a line that is shown at any verbosity.
    """

    def __init__(
        self,
        job: Job,
        control: ControlChannel,
        log: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.stop: Stop | None = None
        self._grace_seconds = job.limits.grace
        self._say = say
        self._signalled_at, self._signalled_by = -math.inf, 0
        self._stop_signal = signal.SIGTERM  # asks the programs to end
        self._is_local = job.hosts.listen is None
        self._control = control
        self._log = log
        self._request = StopRequest(job.limits.grace)
        self._steps = GracefulStop(
            ask=lambda: self._tell_wrappers(job.limits.grace), force=lambda: self._tell_wrappers(0)
        )
        self._patience_seconds = job.limits.grace + _FOLLOW_SECONDS
        self._leave_at = math.inf

    @property
    def asked_at(self) -> float | None:
        """When the programs were asked to end; None before."""
        return self._steps.asked_at

    @property
    def is_refused(self) -> bool:
        """Whether it is known why the job cannot start."""
        return self.stop is not None and self.stop.cause is Cause.REFUSED

    @property
    def may_hang(self) -> bool:
        """Whether a hang would be a new cause: the programs were at most asked to save."""
        is_open = self.stop is None or self.stop.cause is Cause.SIGNAL
        return is_open and self.asked_at is None

    def decide(
        self, cause: Cause, reason: str, number: int = 0, hung: tuple[int, ...] = ()
    ) -> None:
        """Note why the job is to end, by which signal, and who hangs; asks nobody yet."""
        stop = Stop(cause=cause, reason=reason, at=time.monotonic(), signal=number, hung=hung)
        self.stop = stop if self.stop is None else self.stop.followed_by(stop)

    def end(self, cause: Cause, reason: str, number: int = 0) -> None:
        """Ask every instance to end, once; what is left after the grace time is killed."""
        self.decide(cause, reason, number)
        if self.asked_at is None:
            why = "the job cannot start" if cause is Cause.REFUSED else reason
            self._log(f"{why}: stopping the other instances")
            self._steps.begin(now := time.monotonic())
            self._leave_at = math.inf if self._is_local else now + self._patience_seconds

    def end_with_stacks(self, hung: tuple[int, ...], stacks: tuple[StackGroup, ...]) -> None:
        """End a job whose end is decided, now that it is known what the instances were doing."""
        if self.stop is not None:
            self.stop = replace(self.stop, hung=hung, stacks=stacks)
            self.end(self.stop.cause, self.stop.reason)

    def on_signal(self, number: int, reason: str = "") -> None:
        """Handle a signal to the launcher; ``reason`` tells why it was sent, if that is known."""
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            why = reason or f"{signal.Signals(number).name} received"
            self._on_end_signal(Cause.SIGNAL, why, number)
        elif number == signal.SIGUSR1 and self.asked_at is None:
            self._ask_to_save(number)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._pass_on(number)

    def on_signal_of_mpirun(self, number: int) -> None:
        """Handle a signal that was sent to mpirun and kept from it."""
        if self.stop is None or not self.stop.signal:
            name = signal.Signals(number).name
            self._on_end_signal(Cause.MPIRUN_ENDED, f"mpirun was ended by {name}", number)

    def on_end_of_mpirun(self, reason: str, *, is_early: bool) -> None:
        """End the job because mpirun has ended; ``is_early`` tells whether instances still run."""
        if is_early:
            self.end(Cause.MPIRUN_ENDED, reason)
        if self.stop is not None and self.stop.cause is Cause.MPIRUN_ENDED and not self.stop.signal:
            # The stop may have been decided when mpirun began to end the instances, before its end.
            self.stop = replace(self.stop, reason=reason)

    def on_answer(self, index: int, proposal: int, polls: int) -> None:
        """Take an instance's answer to a proposal where to stop."""
        self._advance(self._request.answer(index, proposal, polls, time.monotonic()))

    def on_death(self, index: int) -> None:
        """A program has ended: the others agree without it."""
        self._advance(self._request.leave(index, time.monotonic()))

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        return min(self._request.next_deadline(), self._steps.next_deadline(), self._leave_at)

    def on_time(self, now: float) -> None:
        """Take the step that is due."""
        self._advance(self._request.on_time(now))
        self._steps.on_time(now)
        if now >= self._leave_at:
            self._leave_at = now + self._patience_seconds
            # Nobody here can kill a wrapper there that was stopped: mpirun does when it ends.
            self._control.leave_unanswered()

    def _on_end_signal(self, cause: Cause, reason: str, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        is_again = self.stop is not None and bool(self.stop.signal)
        self.decide(cause, reason, number)
        if is_again:
            is_same = (
                number == self._signalled_by and now < self._signalled_at + _SAME_REQUEST_SECONDS
            )
            if not is_same:
                self._log(f"{name} again: killing all instances")
                self._steps.force_after(0, now)
            return
        self._signalled_at, self._signalled_by = now, number
        if number == signal.SIGINT:
            # A user has typed Ctrl-C and waits at a terminal; other signals come from programs.
            self._say(
                f"{reason}: stopping the instances, which have {self._grace_seconds:g} s to end "
                "(--grace); Ctrl-C again kills them at once"
            )
        if self.asked_at is not None:
            if number == signal.SIGINT:
                self._pass_on(number)
        elif number == signal.SIGINT:
            self._stop_signal = signal.SIGINT
            self.end(cause, reason, number)
        else:
            self._ask_to_save(signal.SIGTERM)

    def _ask_to_save(self, number: int) -> None:
        """Agree with the programs on where to stop because of a signal."""
        peers = self._control.peers.values() if self._control.is_complete else ()
        members = [peer.index for peer in peers if peer.died is None]
        self._advance(self._request.begin(number, members, time.monotonic()))

    def _advance(self, move: Move | None) -> None:
        """Take the next step towards an agreement on where to stop."""
        if move is Move.PROPOSE:
            self._control.broadcast(control_protocol.PROPOSE_STOP, self._request.proposal)
        elif move is Move.AGREE:
            self._log("all instances stop at their next question whether to stop")
            self._control.broadcast(control_protocol.AGREE_STOP, self._request.proposal)
        elif move is Move.SIGNAL and self.stop is not None and self.stop.signal:
            self.end(self.stop.cause, self.stop.reason, self.stop.signal)
        elif move is Move.SIGNAL:
            self._pass_on(self._request.signal)

    def _pass_on(self, number: int) -> None:
        """Deliver a signal of the launcher to the programs."""
        self._control.broadcast(control_protocol.SIGNAL, int(number))

    def _tell_wrappers(self, grace_seconds: float) -> None:
        """Have the wrappers end their programs, also wrappers of this host that were stopped."""
        self._control.broadcast(control_protocol.STOP, [grace_seconds, int(self._stop_signal)])
        if self._is_local:
            for peer in self._control.peers.values():
                if peer.outcome is None:
                    process_control.signal_process(peer.pid, signal.SIGCONT)
