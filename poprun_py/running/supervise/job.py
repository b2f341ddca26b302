"""Values of a run: what to supervise, why it is stopped, and how it ended. They do nothing."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from popdist_py.environment import (
    BETWEEN_CALLS,
    COLLECTIVES,
    COMPILING,
    INFERENCE,
    RESUME_EXIT_CODE,
    TRAINING,
)
from poprun_py.display.public_values import Displayed, summary_of
from poprun_py.errors import JobFailedError, TimeLimitError
from poprun_py.running.supervise.file_transfer import FilePlace

if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView
    from poprun_py.running.watch.records import Recorder

HANG_EXIT_CODE = 124


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The command that starts all instances.

    Attributes:
        words: The command.
        environ: Its environment.
        variables: For each instance, the variables that it gets over the control channel, so that
            no command line shows them; None unsets one.
        stdin_instance: The instance that reads standard input.
        end_signal: The signal that ends mpirun in good order; other signals are kept from it.
    """

    words: tuple[str, ...]
    # Both hold secrets.
    environ: Mapping[str, str] = field(repr=False)
    variables: tuple[Mapping[str, str | None], ...] = field(repr=False)
    stdin_instance: int = 0
    end_signal: int = signal.SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of a job; all defaults are those of a job of this machine alone.

    Attributes:
        listen: The address of this machine for the other hosts.
        network: The only network at which mpirun may listen; None for all.
        names: For each instance, the name that its host gives itself; empty if unknown.
        others: The instances on other hosts.
        leases: For some instances, what they lease on their hosts before any program starts.
        refusal_of: Takes such an instance and its answer; returns why the job cannot start, or an
            empty text.
        explain_failed_start: Raises StartError with the reason why the job does not start, or
            returns what may be wrong with the hosts; None if there is no other host to ask.
    """

    listen: str | None = None
    network: str | None = None
    names: tuple[str, ...] = ()
    others: frozenset[int] = frozenset()
    leases: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    refusal_of: Callable[[int, dict[str, Any]], str] = lambda *_: ""
    explain_failed_start: Callable[[], str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """The time limits of a job, in seconds.

    Attributes:
        timeout: For the whole job; None for no limit.
        spent: The part of ``timeout`` that earlier attempts have used.
        hang_timeout: For a job without progress, or "auto"; None to detect no hangs.
        grace: Between asking a program to end and killing it.
    """

    timeout: float | None = None
    spent: float = 0
    hang_timeout: float | str | None = None
    grace: float = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """The files of a job; None for those that are not wanted.

    Attributes:
        output_dir: An existing folder for the output of the instances.
        places: Where the files that programs leave are collected.
        spans: The folder of the timeline's spans.
        call: A file that every program reads; it is sent to the other hosts.
    """

    output_dir: str | None = None
    places: tuple[FilePlace, ...] = ()
    spans: Path | None = None
    call: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Watchers:
    """What is shown of a job, and what others are told who inspect or record it.

    Attributes:
        output: The form of the instances' output, such as "tag".
        only_output_from: The instances whose output is shown; None for all.
        live: Whether the terminal shows a live view of the instances.
        recorders: Take every training step, and the states of the instances.
        run_id: The name of the run.
        program: A short name of the program.
        ipus: For each instance, its emulated IPUs, numbered within the partition.
        partition: The name of the partition; None without one.
    """

    output: str = "tag"
    only_output_from: frozenset[int] | None = None
    live: bool = False
    recorders: tuple[Recorder, ...] = ()
    run_id: str = ""
    program: str = ""
    ipus: tuple[range, ...] = ()
    partition: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One attempt at a launch, as the supervisor runs it."""

    command: Command
    hosts: Hosts = Hosts()
    limits: JobLimits = JobLimits()
    files: JobFiles = JobFiles()
    watchers: Watchers = Watchers()

    @property
    def num_instances(self) -> int:
        """The number of instances."""
        return len(self.command.variables)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a program is, in the user's own steps.

    ``step`` training steps are done, those before the checkpoint of step ``resumed`` included, and
    since the last of them ``calls`` others, such as of a validation. ``doing`` says what goes on
    now.
    """

    step: int
    calls: int = 0
    resumed: int = 0
    doing: int = BETWEEN_CALLS

    @property
    def kind(self) -> int:
        """What has to end before there is progress again: between calls, one like the last."""
        if self.doing in (TRAINING, INFERENCE, COMPILING):
            return self.doing
        return INFERENCE if self.calls else TRAINING

    @property
    def counts(self) -> bool:
        """Whether anything was counted, or will be, as far as this tells."""
        return self.has_begun or self.resumed > 0 or self.doing != BETWEEN_CALLS

    @property
    def has_begun(self) -> bool:
        """Whether any call has ended since the program began, or resumed."""
        return self.step > self.resumed or self.calls > 0

    def calls_since(self, before: Progress) -> int | None:
        """Return how many calls of one kind ended since; None if there were several kinds."""
        if (self.kind, self.resumed) != (before.kind, before.resumed) or self.step < before.step:
            return None
        if self.kind == TRAINING:
            return self.step - before.step
        is_same_step = self.step == before.step and self.calls >= before.calls
        return self.calls - before.calls if is_same_step else None


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective of the library that a program began: its number, counted from 1.

    ``goes_on``: it has not ended. It was begun ``seconds`` ago.
    """

    number: int
    name: str
    goes_on: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, call: Sequence[float]) -> Collective | None:
        """Return what a wrapper says; None before the first."""
        number, which, goes_on, seconds = call
        if not 0 < which < len(COLLECTIVES):
            return None
        return cls(int(number), COLLECTIVES[int(which)], bool(goes_on), seconds)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class InstanceResult(Displayed):
    """How one instance ended. ``code`` is negative for a signal; None if it never reported.

    ``ended_ns`` is on this machine's clock. ``progress`` is None for a program that counts no
    steps. ``collective`` is the last that such a one began; None before the first. ``was_stopped``:
    the supervisor had asked it to end. ``was_lost``: it vanished together with its wrapper.
    ``had_last_word``: its last lines, or a traceback that it wrote as well, are at the end of the
    screen's stderr. ``oom_kills`` counts processes that the kernel killed in its control group for
    want of memory while it ran. ``trained_alone``: it trained with torch, and called no collective
    together with other instances.
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

    def __repr__(self) -> str:
        # What a program wrote may be long, and secret.
        where = f", host={self.host!r}" if self.host else ""
        step = f", step={self.step}" if self.step is not None else ""
        stopped = ", was_stopped=True" if self.was_stopped else ""
        return f"InstanceResult(index={self.index}{where}, code={self.code}{step}{stopped})"

    @property
    def step(self) -> int | None:
        """The number of training steps done; None for a program that counts none."""
        return None if self.progress is None else self.progress.step

    @property
    def exit_code(self) -> int:
        """The code as a shell shows it: 128 + signal when killed."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and neither well nor at a checkpoint."""
        return self.code not in (None, 0, RESUME_EXIT_CODE) and not self.was_stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class StackGroup:
    """Instances whose Python stacks are the same; ``waits`` if they wait for other instances."""

    instances: tuple[int, ...]
    text: str
    waits: bool = False

    @property
    def has_stack(self) -> bool:
        """Whether there is a stack, and not only the reason why there is none."""
        return "most recent call first" in self.text


class Cause(enum.Enum):
    """Why a job is stopped, the gravest first."""

    REFUSED = enum.auto()  # it cannot start
    TIME_LIMIT = enum.auto()
    HANG = enum.auto()
    SIGNAL = enum.auto()  # sent to the launcher
    FAILED = enum.auto()  # an instance did
    STRAGGLER = enum.auto()  # instances go on after another has ended at a checkpoint
    MPIRUN_ENDED = enum.auto()


# Which cause counts when another follows before the job has ended; among equals the first.
_GRAVITY = {
    Cause.REFUSED: 3,
    Cause.TIME_LIMIT: 2,
    Cause.HANG: 2,
    Cause.SIGNAL: 1,
    Cause.FAILED: 0,
    Cause.STRAGGLER: 0,
    Cause.MPIRUN_ENDED: 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why a job was to end before all its instances had ended by themselves.

    ``at`` is on the monotonic clock. ``signal`` is what the launcher was sent, 0 for none. ``hung``
    names the instances that made no more steps, ``stacks`` what all were doing then.
    """

    cause: Cause
    reason: str
    at: float
    signal: int = 0
    hung: tuple[int, ...] = ()
    stacks: tuple[StackGroup, ...] = ()

    def followed_by(self, later: Stop) -> Stop:
        """Return what counts when a later cause comes before the job has ended."""
        graver = later if _GRAVITY[later.cause] > _GRAVITY[self.cause] else self
        return replace(graver, at=self.at, signal=self.signal or later.signal)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchResult(Displayed):
    """How the job ended: its exit code, every instance, and the one that failed first.

    ``cause`` is why it was to end before all instances had ended by themselves, None if it was not;
    ``reason`` says that in words, ``advice`` what to do, where that is known. ``run_id`` names the
    run, as the instances' POPRUN_RUN_ID does.
    ``hung`` names the instances that made no more steps, ``stacks`` what all were doing then.
    ``paused_seconds`` is the part of ``seconds`` in which the job was stopped (Ctrl-Z) or debugged:
    it counts towards no limit.
    ``view`` tells where the time of the instances went. ``was_interrupted`` tells of a Ctrl-C that
    came when all had ended, and changed nothing of it.
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
    restart_count: int = 0
    may_restart: bool = False
    cause: Cause | None = None
    run_id: str = ""
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
        """Return this result if the job ended well.

        Raises:
            TimeLimitError: The job ran into its time limit, or hung.
            JobFailedError: It ended with another exit code than 0, at a checkpoint included.
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
    def explanation(self) -> str:
        """The reason, and what to do about it."""
        return ". ".join(filter(None, (self.reason, self.advice)))


def describe(code: int) -> str:
    """Return ``exit code 3`` or ``signal SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
