"""The shutdown of a job, from the decision to stop the job to SIGKILL.

Programs that call ``stopRequested()`` first agree to stop at the same call. Programs without calls
of ``stopRequested()`` get one signal from their wrappers: SIGINT after Ctrl-C, and SIGTERM in all
other cases. A wrapper measures the grace time, and then sends SIGKILL to a program that still runs.
A second signal to the launcher ends the grace time early.
"""

from __future__ import annotations

import enum
import math
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from poprun_py.instance import control_protocol, process_control
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.job_description import Job, JobLimits
from poprun_py.running.supervise.launch_result import Cause, StackGroup, Stop

_FIRST_MARGIN, _MARGIN_FACTOR = 2, 4
# A wrapper that is not stopped answers a proposal at once, or within a second on a loaded host.
_ANSWER_SECONDS = 3.0


class StopAction(enum.Enum):
    """The launcher's next action when programs are to stop at the same call."""

    PROPOSE = "send the proposal to every instance"
    AGREE = "tell every instance that the proposal is agreed"
    SIGNAL = "send the signal: no program asks whether to stop, or the time is over"


class StopRequest:
    """A signal to the launcher that programs may answer by stopping at the same call.

    Each instance counts its calls of ``stopRequested()``. A proposal names a call that no instance
    has reached yet. An instance waits when it reaches the proposed call. When every instance has
    confirmed that it is still before the proposed call, the proposal is agreed. If an instance has
    made the proposed call already, a later call is proposed. The first proposal, 0, only requests
    each instance's number of calls. The methods send nothing, but return the next action.

    Args:
        grace_seconds: The seconds after SIGTERM within which programs have to stop at the agreed
            call and to save.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.signal = 0
        self.proposal = 0
        self.agreed = False  # whether all instances have confirmed the proposal
        self._grace_seconds = grace_seconds
        self._deadline = math.inf
        self._is_begun = False
        self._is_saving = False
        self._members: set[int] = set()
        self._awaited: set[int] = set()
        self._calls: dict[int, int] = {}
        self._margin = _FIRST_MARGIN

    def begin(self, number: int, members: Collection[int], now: float) -> StopAction | None:
        """Begin to stop the programs because of signal ``number``, or 0 for new hosts.

        SIGTERM limits the time to save, and replaces the signal of a running request. ``members``
        are the instances whose programs run; empty before all instances have connected.
        """
        if self._is_begun:
            if number == signal.SIGTERM:
                self.signal = number
                self._limit_saving(now)
            return None
        self.signal = number
        if not members:
            return StopAction.SIGNAL
        self.proposal, self.agreed, self._margin = 0, False, _FIRST_MARGIN
        self._members, self._awaited, self._calls = set(members), set(members), {}
        self._is_begun, self._is_saving = True, False
        self._deadline = now + _ANSWER_SECONDS
        return StopAction.PROPOSE

    def answer(self, member: int, proposal: int, calls: int, now: float) -> StopAction | None:
        """Record an instance's number of calls; return the next action after the last answer."""
        if not self._is_begun or proposal != self.proposal or member not in self._awaited:
            return None
        self._awaited.discard(member)
        self._calls[member] = calls
        return self._next(now)

    def remove(self, member: int, now: float) -> StopAction | None:
        """Continue without an instance that has ended; return the next action, if any."""
        if not self._is_begun or member not in self._members:
            return None
        self._members.discard(member)
        self._awaited.discard(member)
        self._calls.pop(member, None)
        return self._next(now)

    def next_deadline(self) -> float:
        """Return the time when programs that still run get the signal; inf for never."""
        return self._deadline

    def on_time(self, now: float) -> StopAction | None:
        """Return ``StopAction.SIGNAL`` when the time to answer, or to save, is over."""
        if now < self._deadline:
            return None
        if not self._is_saving:
            self._is_begun = False
        self._deadline = math.inf
        return StopAction.SIGNAL

    def _next(self, now: float) -> StopAction | None:
        if self._awaited or self.agreed:
            return None
        most = max(self._calls.values(), default=0)
        if not most:
            self._is_begun, self._deadline = False, math.inf
            return StopAction.SIGNAL
        if self.proposal and most < self.proposal:
            self.agreed = True
            return StopAction.AGREE
        self.proposal = most + self._margin
        self._margin *= _MARGIN_FACTOR
        self._awaited = set(self._members)
        self._limit_saving(now)
        return StopAction.PROPOSE

    def _limit_saving(self, now: float) -> None:
        """After SIGTERM, limit the time for saving to the grace time."""
        if not self._is_saving:
            self._is_saving = True
            self._deadline = math.inf
        if self.signal == signal.SIGTERM:
            self._deadline = min(self._deadline, now + self._grace_seconds)


# The seconds that a wrapper has, after the grace time, to kill its program and to report the end of
# the program. A stopped wrapper does not report.
_REPORT_SECONDS = 5.0
# One request to end the job may arrive as two signals: a parent process may pass on a Ctrl-C that
# the terminal sends as well, and timeout(1) sends SIGTERM to its child and to its process group.
_SAME_REQUEST_SECONDS = 0.3
# The seconds until programs that cannot stop for new hosts are asked again.
_NEW_HOSTS_SECONDS = 5.0


class JobShutdown:
    """The shutdown of one job.

    Args:
        job: The job.
        control: The connections to the instances.
        log: Writes a line of the launcher's own log.
        say: Shows a line to the user at any verbosity.
        begun: Called once, with the time when the programs are asked to end.
    """

    def __init__(
        self,
        job: Job,
        control: ControlChannel,
        log: Callable[[str], None],
        say: Callable[[str], None],
        begun: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.stop: Stop | None = None  # None before the shutdown
        self.asked_at: float | None = None  # when the programs were asked to end
        self._grace_seconds = job.limits.grace
        self._say = say
        self._begun = begun
        self._signalled_at, self._signalled_by = -math.inf, 0
        self._stop_signal = signal.SIGTERM  # the signal that asks programs to end
        self._is_local = job.hosts.listen is None
        self._control = control
        self._log = log
        self._request = StopRequest(job.limits.grace)
        self._kill_at = math.inf
        self._job = job
        self._new_hosts = ""  # the reason for a stop because of new hosts, if it is requested
        self._has_told_of_hosts = False
        self._use_hosts_at = math.inf  # when the programs are asked again to stop for new hosts
        self._report_seconds = job.limits.grace + _REPORT_SECONDS
        self._drop_at = math.inf

    @property
    def is_refused(self) -> bool:
        """Whether the job cannot start, for a known reason."""
        return self.stop is not None and self.stop.cause is Cause.REFUSED

    @property
    def may_hang(self) -> bool:
        """Whether a hang could still end the job, because no program was asked to end yet."""
        is_open = self.stop is None or self.stop.cause in (Cause.SIGNAL, Cause.HOSTS)
        return is_open and self.asked_at is None

    def decide(
        self, cause: Cause, reason: str, number: int = 0, hung: tuple[int, ...] = ()
    ) -> None:
        """Note why the job is to end, without asking the instances to end yet.

        ``number`` is the signal that caused the shutdown; 0 without a signal.
        """
        stop = Stop(cause=cause, reason=reason, at=time.monotonic(), signal=number, hung=hung)
        self.stop = stop if self.stop is None else self.stop.followed_by(stop)

    def end(self, cause: Cause, reason: str, number: int = 0) -> None:
        """Ask every program to end, once; wrappers kill programs left after the grace time."""
        self.decide(cause, reason, number)
        if self.asked_at is None:
            why = "the job cannot start" if cause is Cause.REFUSED else reason
            self._log(f"{why}: stopping the other instances")
            now = time.monotonic()
            self.asked_at = now
            self._stop_programs(self._grace_seconds)
            may_wait = self._is_local and not self._job.hosts.keeps_state
            self._drop_at = math.inf if may_wait else now + self._report_seconds
            self._begun(now)

    def end_with_stacks(self, hung: tuple[int, ...], stacks: tuple[StackGroup, ...]) -> None:
        """End the job for the cause that ``decide`` has noted; add the stacks to its result."""
        if self.stop is not None:
            self.stop = replace(self.stop, hung=hung, stacks=stacks)
            self.end(self.stop.cause, self.stop.reason)

    def use_new_hosts(self, reason: str) -> None:
        """End the attempt at a state that the next attempt loads, because it can use more hosts.

        Programs that keep their newest state in memory end at once. Other programs end when they
        have saved a checkpoint at the same call of ``stopRequested()``. Programs that do not call
        ``stopRequested()`` go on, because their work since their last checkpoint would be lost.
        """
        peers = self._control.peers.values()
        is_running = self._control.is_complete and all(p.program_end is None for p in peers)
        if self.stop is not None or not is_running:
            return  # the next attempt, if there is one, uses the new hosts anyway
        if self._keeps_state():
            self.end(Cause.HOSTS, reason)
        else:
            self._new_hosts = reason
            self._ask_to_save(0)

    def _keeps_state(self) -> bool:
        """Tell whether the newest state of the training is in memory."""
        hosts, folder = self._job.hosts, self._job.files.checkpoint_memory
        # A program makes the folder when it saves the first state. The folders of other hosts are
        # not visible here.
        has_local = len(hosts.others) < self._job.num_instances
        is_saved = folder is not None and Path(folder).is_dir()
        return hosts.keeps_state and (is_saved or not has_local)

    def _postpone_new_hosts(self) -> None:
        """Ask the programs again later, because they may not have begun to train."""
        self._use_hosts_at = time.monotonic() + _NEW_HOSTS_SECONDS
        if not self._has_told_of_hosts:
            self._has_told_of_hosts = True
            self._say(
                f"{self._new_hosts}: the job will use new hosts after its next restart, or when "
                "its programs keep their state in memory (--memory-checkpoints) or call "
                "stopRequested()"
            )

    def on_signal(self, number: int, reason: str = "") -> None:
        """Handle a signal to the launcher; ``reason`` says why the signal was sent, if known."""
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            why = reason or f"{signal.Signals(number).name} received"
            self._on_end_signal(Cause.SIGNAL, why, number)
        elif number == signal.SIGUSR1 and self.asked_at is None:
            self._ask_to_save(number)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._send_signal(number)

    def on_signal_of_mpirun(self, number: int) -> None:
        """Handle a signal that was sent to mpirun, and that mpirun blocks."""
        if self.stop is None or not self.stop.signal:
            name = signal.Signals(number).name
            self._on_end_signal(Cause.MPIRUN_ENDED, f"mpirun was ended by {name}", number)

    def on_end_of_mpirun(self, reason: str, *, is_early: bool) -> None:
        """End the job because mpirun has ended; ``is_early`` if instances are still running."""
        if is_early:
            self.end(Cause.MPIRUN_ENDED, reason)
        if self.stop is not None and self.stop.cause is Cause.MPIRUN_ENDED and not self.stop.signal:
            # The earlier reason, from the time when mpirun began to end the instances, is replaced,
            # because it does not contain mpirun's exit code.
            self.stop = replace(self.stop, reason=reason)

    def on_answer(self, index: int, proposal: int, calls: int) -> None:
        """Handle an instance's answer to a proposal to stop at a call."""
        self._act(self._request.answer(index, proposal, calls, time.monotonic()))

    def on_program_end(self, index: int) -> None:
        """Let the other instances agree to stop without ``index``, whose program has ended."""
        self._act(self._request.remove(index, time.monotonic()))

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        deadlines = (self._kill_at, self._drop_at, self._use_hosts_at)
        return min(self._request.next_deadline(), *deadlines)

    def on_time(self, now: float) -> None:
        """Do the next step of the shutdown if its time has come."""
        self._act(self._request.on_time(now))
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._stop_programs(0)
        if now >= self._use_hosts_at:
            self._use_hosts_at = math.inf
            self.use_new_hosts(self._new_hosts)
        if now >= self._drop_at:
            self._drop_at = now + self._report_seconds
            # The launcher cannot kill a stopped wrapper on another host. mpirun kills such a
            # wrapper when mpirun itself ends. A wrapper that has left mpirun ends when continued.
            self._control.drop_unfinished()

    def _on_end_signal(self, cause: Cause, reason: str, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        is_repeated = self.stop is not None and bool(self.stop.signal)
        self.decide(cause, reason, number)
        if is_repeated:
            is_same = (
                number == self._signalled_by and now < self._signalled_at + _SAME_REQUEST_SECONDS
            )
            if not is_same:
                self._log(f"received {name} again: killing all instances")
                self._kill_at = now
            return
        self._signalled_at, self._signalled_by = now, number
        if number == signal.SIGINT:
            # This message is only for a user who typed Ctrl-C and waits at a terminal. Other
            # signals come from programs.
            self._say(
                f"{reason}: stopping the instances, which have {self._grace_seconds:g} s to end "
                "(--grace). Press Ctrl-C again to kill the instances at once"
            )
        if self.asked_at is not None:
            if number == signal.SIGINT:
                self._send_signal(number)
        elif number == signal.SIGINT:
            self._stop_signal = signal.SIGINT
            self.end(cause, reason, number)
        else:
            self._ask_to_save(signal.SIGTERM)

    def _ask_to_save(self, number: int) -> None:
        peers = self._control.peers.values() if self._control.is_complete else ()
        members = [peer.index for peer in peers if peer.program_end is None]
        self._act(self._request.begin(number, members, time.monotonic()))

    def _act(self, action: StopAction | None) -> None:
        if action is StopAction.PROPOSE:
            self._control.broadcast(control_protocol.PROPOSE_STOP, self._request.proposal)
        elif action is StopAction.AGREE:
            if not self._request.signal:
                self.decide(Cause.HOSTS, self._new_hosts)
            self._log("all instances stop at their next call of stopRequested()")
            self._control.broadcast(control_protocol.AGREE_STOP, self._request.proposal)
        elif action is StopAction.SIGNAL and self.stop is not None and self.stop.signal:
            self.end(self.stop.cause, self.stop.reason, self.stop.signal)
        elif action is StopAction.SIGNAL and self._request.signal:
            self._send_signal(self._request.signal)
        elif action is StopAction.SIGNAL:
            self._postpone_new_hosts()

    def _send_signal(self, number: int) -> None:
        self._control.broadcast(control_protocol.SIGNAL, int(number))

    def _stop_programs(self, grace_seconds: float) -> None:
        self._control.broadcast(control_protocol.STOP, [grace_seconds, int(self._stop_signal)])
        if self._is_local:
            # Stopped wrappers on this host must be continued, so that they can end their programs.
            for peer in self._control.peers.values():
                if peer.instance_end is None:
                    process_control.signal_process(peer.pid, signal.SIGCONT)


class TimeLimits:
    """The time limit of a job, and the limit after one instance has ended at a checkpoint.

    ``reached`` is called once for each limit that is reached, with the cause and a reason in words.
    The job starts at time ``now``.
    """

    def __init__(
        self, limits: JobLimits, reached: Callable[[Cause, str], None], now: float
    ) -> None:
        self.paused_seconds = 0.0  # the total time of the pauses that have ended
        self._grace_seconds = limits.grace
        self._reached = reached
        # For each limit, its time, on a clock that stops during pauses, and its reason in words.
        self._limits: dict[Cause, tuple[float, str]] = {}
        self._paused_at: float | None = None
        if limits.timeout is not None:
            reason = f"the time limit of {limits.timeout:g} s is over"
            self._limits[Cause.TIME_LIMIT] = (now + limits.timeout - limits.spent, reason)

    def on_checkpoint_end(self, index: int, now: float) -> None:
        """Limit the other instances to the grace time, as ``index`` has ended at a checkpoint."""
        reason = f"instance {index} ended at a checkpoint, but other instances did not"
        at = now - self.paused_seconds + self._grace_seconds
        self._limits.setdefault(Cause.STRAGGLER, (at, reason))

    def pause(self, now: float) -> None:
        """Pause all limits until ``resume``."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """Resume all limits; the time of the pause counts towards no limit."""
        if self._paused_at is None:
            return
        self.paused_seconds += now - self._paused_at
        self._paused_at = None

    def next_deadline(self) -> float:
        """Return the time of the next limit; inf for never."""
        if self._paused_at is not None or not self._limits:
            return math.inf
        return min(self._limits.values())[0] + self.paused_seconds

    def on_time(self, now: float) -> None:
        """Report a limit that is reached."""
        if now < self.next_deadline():
            return
        cause, (_, reason) = min(self._limits.items(), key=lambda limit: limit[1][0])
        del self._limits[cause]
        self._reached(cause, reason)
