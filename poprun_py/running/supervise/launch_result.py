"""The result of a job and of its instances, and the cause of a job's stop."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from popdist_py.environment import (
    AUTOMATIC,
    BETWEEN_CALLS,
    COLLECTIVES,
    COMPILING,
    INFERENCE,
    RESUME_EXIT_CODE,
    TRAINING,
)
from poprun_py.display.public_values import Displayed, summary_of
from poprun_py.errors import JobFailedError, TimeLimitError

if TYPE_CHECKING:
    from pathlib import Path

    from poprun_py.running.watch.job_view import JobView

HANG_EXIT_CODE = 124


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a program, in training steps and other calls.

    Attributes:
        step: The number of training steps done, including the steps before a checkpoint from which
            the program resumed.
        calls: The number of other calls since the last training step, such as for a validation.
        resumed: The training step of the checkpoint from which the program resumed; 0 for none.
        doing: The current activity, such as ``TRAINING`` or ``COMPILING``, or ``AUTOMATIC``.
    """

    step: int
    calls: int = 0
    resumed: int = 0
    doing: int = BETWEEN_CALLS

    @property
    def kind(self) -> int:
        """The kind of the current call; between calls, the kind of the last call."""
        if self.doing in (TRAINING, INFERENCE, COMPILING):
            return self.doing
        return INFERENCE if self.calls else TRAINING

    @property
    def is_automatic(self) -> bool:
        """Whether the steps are those of torch's optimizer, which the program does not report."""
        return self.doing == AUTOMATIC

    @property
    def counts(self) -> bool:
        """Whether the program is known to count steps or calls."""
        return self.has_begun or self.resumed > 0 or self.doing != BETWEEN_CALLS

    @property
    def has_begun(self) -> bool:
        """Whether any call has ended since the program began or resumed."""
        return self.step > self.resumed or self.calls > 0

    def calls_since(self, before: Progress) -> int | None:
        """Return the number of calls since ``before``; None if the calls are of several kinds."""
        if (self.kind, self.resumed) != (before.kind, before.resumed) or self.step < before.step:
            return None
        if self.kind == TRAINING:
            return self.step - before.step
        is_same_step = self.step == before.step and self.calls >= before.calls
        return self.calls - before.calls if is_same_step else None


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective operation of popdist_py that a program has begun.

    Attributes:
        number: The number of the collective in the program, counted from 1.
        name: The name of the collective.
        goes_on: Whether the collective has begun and not ended.
        seconds: The time since the collective began.
    """

    number: int
    name: str
    goes_on: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, call: Sequence[float]) -> Collective | None:
        """Return the collective in a wrapper's message; None before the first collective."""
        number, which, goes_on, seconds = call
        if not 0 < which < len(COLLECTIVES):
            return None
        return cls(int(number), COLLECTIVES[int(which)], bool(goes_on), seconds)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class InstanceResult(Displayed):
    """The result of one instance.

    Attributes:
        index: The index of the instance.
        host: The name of the instance's host; empty if the instance's wrapper never connected.
        pid: The process id of the instance's program; 0 if the program never started.
        code: The exit code of the program, negative for a signal; None if the end of the program
            was never reported.
        ended_ns: The time when the program ended, in nanoseconds on this machine's clock.
        progress: The program's progress; None for a program that does not count steps.
        collective: The last collective that the program began; None before the first collective.
        max_rss_bytes: The peak of the program's resident memory.
        memory_limit_bytes: The memory limit of the program's control group; None without a limit.
        oom_kills: The number of processes of the program's control group that the kernel killed
            during the run, because memory was exhausted.
        was_stopped: Whether the supervisor had asked the program to end.
        was_lost: Whether the instance's wrapper disconnected without reporting the end of the
            program.
        had_last_word: Whether the last lines of the program's stderr, or an equal traceback of
            another instance, are at the end of the launcher's stderr.
        stderr_tail: The last part of the program's stderr.
        trained_alone: Whether the program trained with torch without any collective with other
            instances.
        has_model: Whether the program has made a PopTorch model.
    """

    index: int
    host: str = ""
    pid: int = 0
    code: int | None = None
    ended_ns: int = 0
    progress: Progress | None = None
    collective: Collective | None = None
    max_rss_bytes: int = 0
    memory_limit_bytes: int | None = None
    oom_kills: int = 0
    was_stopped: bool = False
    was_lost: bool = False
    had_last_word: bool = False
    stderr_tail: str = ""
    trained_alone: bool = False
    has_model: bool = False

    def __repr__(self) -> str:
        # The stderr of a program may be long and may contain secrets, so repr() omits it.
        where = f", host={self.host!r}" if self.host else ""
        step = f", step={self.step}" if self.step is not None else ""
        stopped = ", was_stopped=True" if self.was_stopped else ""
        return f"InstanceResult(index={self.index}{where}, code={self.code}{step}{stopped})"

    @property
    def step(self) -> int | None:
        """The number of training steps done; None for a program that does not count steps."""
        return None if self.progress is None else self.progress.step

    @property
    def exit_code(self) -> int:
        """The exit code as a shell shows it: 128 + signal number if a signal ended the program."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def failed(self) -> bool:
        """Whether the program failed, and was neither stopped nor ended at a checkpoint."""
        return self.code not in (None, 0, RESUME_EXIT_CODE) and not self.was_stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class StackGroup:
    """Instances with equal Python stacks.

    Attributes:
        instances: The indices of the instances.
        text: The stacks of the instances, or the reason why the stacks are missing.
        waits: Whether the instances wait for other instances.
    """

    instances: tuple[int, ...]
    text: str
    waits: bool = False

    @property
    def has_stack(self) -> bool:
        """Whether ``text`` is a stack, not the reason why the stack is missing."""
        return "most recent call first" in self.text


class Cause(enum.Enum):
    """The causes of the stop of a job, the most severe cause first."""

    REFUSED = enum.auto()  # the job cannot start
    TIME_LIMIT = enum.auto()
    HANG = enum.auto()
    SIGNAL = enum.auto()  # the launcher received a signal
    FAILED = enum.auto()  # an instance failed
    STRAGGLER = enum.auto()  # one instance has ended at a checkpoint, and others run on
    MPIRUN_ENDED = enum.auto()
    HOSTS = enum.auto()  # the next attempt can use more hosts


class Restart(enum.Enum):
    """Whether and how a job is restarted after an attempt."""

    NONE = enum.auto()
    NEW_MPIRUN = enum.auto()
    SAME_WRAPPERS = enum.auto()  # as far as wrappers of the attempt still run


# If a job has several causes to stop, its result has the most severe cause, or the first of equally
# severe causes. Causes of a stop that are not listed here have the severity 0.
_SEVERITY = {
    Cause.REFUSED: 3,
    Cause.TIME_LIMIT: 2,
    Cause.HANG: 2,
    Cause.SIGNAL: 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The stop of a job before all its instances had ended, with its cause and time.

    Attributes:
        cause: The cause of the stop.
        reason: The cause of the stop in words.
        at: The time of the stop, in seconds on the monotonic clock.
        signal: The signal to the launcher or mpirun that caused the stop; 0 without a signal.
        hung: The instances that others were waiting for when the job hung; empty without a hang.
        stacks: The stacks of all instances, if they were collected for the stop.
    """

    cause: Cause
    reason: str
    at: float
    signal: int = 0
    hung: tuple[int, ...] = ()
    stacks: tuple[StackGroup, ...] = ()

    def followed_by(self, later: Stop) -> Stop:
        """Return the more severe of this stop and ``later``, with the time of this stop."""
        is_severer = _SEVERITY.get(later.cause, 0) > _SEVERITY.get(self.cause, 0)
        severer = later if is_severer else self
        return replace(severer, at=self.at, signal=self.signal or later.signal)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchResult(Displayed):
    """The result of a job.

    Attributes:
        exit_code: The exit code of the job.
        instances: The results of all instances.
        first_failure: The instance that failed first; None if no instance failed by itself.
        reason: The reason why the job was stopped; empty if it was not stopped.
        advice: Advice to the user about the failure; empty without advice.
        timed_out: Whether the job reached its time limit.
        hung: The instances that others were waiting for when the job hung; empty without a hang.
        stacks: The stacks of all instances when the job hung or reached its time limit.
        seconds: The duration of the job.
        paused_seconds: The part of ``seconds`` in which the job was stopped (Ctrl-Z) or debugged,
            which does not count towards the limits.
        ending_seconds: The part of ``seconds`` after the decision to stop the job; 0 if the job was
            not stopped.
        restart_count: The number of restarts.
        may_restart: Whether another attempt may succeed.
        cause: The cause of the stop; None if all instances ended by themselves.
        run_id: The name of the run, as in POPRUN_RUN_ID.
        report: The absolute path of the run's page, or of its report.json if the page could not be
            written; None without --output-dir.
        view: How the instances spent their time.
        was_interrupted: Whether the user typed Ctrl-C after all instances had ended.
    """

    exit_code: int
    instances: tuple[InstanceResult, ...] = ()
    first_failure: InstanceResult | None = None
    reason: str = ""
    advice: str = ""
    timed_out: bool = False
    hung: tuple[int, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    seconds: float = 0.0
    paused_seconds: float = 0.0
    ending_seconds: float = 0.0
    restart_count: int = 0
    may_restart: bool = False
    cause: Cause | None = None
    run_id: str = ""
    report: Path | None = None
    view: JobView | None = None
    was_interrupted: bool = False

    def __repr__(self) -> str:
        first = self.first_failure
        parts = (
            f"exit_code={self.exit_code}",
            f"instances={len(self.instances)}",
            f"seconds={self.seconds:.2f}",
            *([f"first_failure={first.index}"] if first is not None else []),
            *([f"reason={self.reason!r}"] if self.reason else []),
            *([f"run_id={self.run_id!r}"] if self.run_id else []),
        )
        return f"LaunchResult({', '.join(parts)})"

    def raise_for_failure(self) -> Self:
        """Return this result if the exit code of the job is 0.

        Raises:
            TimeLimitError: The job reached its time limit, or hung.
            JobFailedError: The exit code of the job is not 0, for example because the job ended at
                a checkpoint.
        """
        if self.exit_code == 0:
            return self
        kind = TimeLimitError if self.timed_out or self.hung else JobFailedError
        summary, report = summary_of(self), str(self)
        error = kind(summary, self)
        if report != summary:
            error.add_note(report)
        raise error

    @property
    def last_step(self) -> int | None:
        """The highest training step that an instance has finished; None if none counts steps."""
        return max((each.step for each in self.instances if each.step is not None), default=None)

    @property
    def ended_for_hosts(self) -> bool:
        """Whether the job was only stopped because its next attempt can use more hosts."""
        return self.cause is Cause.HOSTS and self.first_failure is None

    @property
    def explanation(self) -> str:
        """The reason for the stop of the job and the advice to the user, as one text."""
        return ". ".join(filter(None, (self.reason, self.advice)))


def describe(code: int) -> str:
    """Return an exit code in words, such as ``exit code 3`` or ``signal SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
