"""Records of training steps, and the interface of recorders for steps and views of a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from popdist_py.errors import counted
from poprun_py.display.formatting import loss_from_json, loss_to_json
from poprun_py.errors import explain_os_error
from poprun_py.running.watch.job_view import JobView


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step of one instance.

    Attributes:
        at: The time when the step ended, in seconds since the epoch, on the launcher's clock.
        step: The number of training steps done so far, including steps before a loaded checkpoint.
        seconds: The duration since the end of the previous step, without the time for compiling,
            validating and saving; 0 for a program's first step, whose start is unknown.
        own_seconds: The duration ``seconds`` less the time of waiting for other instances.
        samples: The number of samples that the instance trained on; 0 if unknown.
        every: The number of steps that this record stands for; above 1 if a file omits steps.
    """

    at: float
    instance: int
    step: int
    seconds: float
    own_seconds: float
    samples: int = 0
    loss: float | None = None
    every: int = 1

    @property
    def is_timed(self) -> bool:
        """Whether the time and duration of the step are known and finite."""
        return math.isfinite(self.at) and 0 < self.seconds < math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values for one line of a file; default values are left out."""
        return {
            "at": round(self.at, 6),
            "instance": self.instance,
            "step": self.step,
            "seconds": round(self.seconds, 9),
            "own_seconds": round(self.own_seconds, 9),
            "samples": self.samples,
            **({} if self.loss is None else {"loss": loss_to_json(self.loss)}),
            **({} if self.every == 1 else {"every": self.every}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRecord:
        """Create a step record from JSON values that ``to_json`` returned.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is not a valid step record.
        """
        return cls(
            at=float(data["at"]),
            instance=int(data["instance"]),
            step=int(data["step"]),
            seconds=float(data["seconds"]),
            own_seconds=float(data["own_seconds"]),
            samples=int(data["samples"]),
            loss=loss_from_json(data.get("loss")),
            every=int(data.get("every", 1)),
        )


class StepReader:
    """Converts the messages of one instance's wrapper to step records.

    The reader estimates the difference between the host's clock and the launcher's clock. Each
    answer of a wrapper gives bounds for the clock difference, because the wrapper read the host's
    clock between the launcher's request and the arrival of the answer. The estimated difference
    changes only if it is outside the bounds, so a delayed answer does not shift the times of steps.

    ``lost`` is the number of steps that were not recorded, because they ended in quick succession.
    """

    def __init__(self, index: int) -> None:
        self.lost = 0
        self._index = index
        self._clock_offset: float | None = None  # launcher's minus host's clock, in seconds
        self._last_at = 0.0

    def read(self, message: Mapping[str, Any], asked: float, came: float) -> list[StepRecord]:
        """Return the steps in a wrapper's message, in order; times in seconds since the epoch.

        Args:
            message: The wrapper's message, which contains its ``ledger`` and the new ``steps``.
            asked: The time when the launcher asked for the message; -inf if the launcher did not
                ask.
            came: The time when the wrapper's message arrived.
        """
        ledger, steps = message.get("ledger"), message.get("steps")
        if ledger is None or steps is None:
            return []
        self.lost += steps["lost"]
        host_time = ledger["now"] / 1e9
        least, most = asked - host_time, came - host_time
        offset = most if self._clock_offset is None else self._clock_offset
        self._clock_offset = min(max(offset, least), most)
        return [self._record(row, self._clock_offset) for row in steps["rows"]]

    def _record(self, row: Sequence[Any], clock_offset: float) -> StepRecord:
        number, ended, taken, own, samples, loss = row
        self._last_at = max(self._last_at, ended / 1e9 + clock_offset)
        return StepRecord(
            at=self._last_at,
            instance=self._index,
            step=number,
            seconds=max(0, taken) / 1e9,
            own_seconds=max(0, own) / 1e9,
            samples=samples,
            loss=loss,
        )


class Recorder(Protocol):
    """The interface of recorders of a job. A recorder must not block the supervisor's loop."""

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Receive new training steps of one instance, in order."""

    def view(self, view: JobView, at: float, /) -> None:
        """Receive a view of the job, and its time in seconds since the epoch."""


class Recorders:
    """Passes steps and job views on to all recorders of a job that have not failed."""

    def __init__(self, recorders: Sequence[Recorder], warn: Callable[[str], None]) -> None:
        self._recorders = list(recorders)
        self._warn = warn

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Pass new training steps of one instance on to all recorders."""
        if records:
            self._each(lambda recorder: recorder.steps(records))

    def view(self, view: JobView, at: float) -> None:
        """Pass a view of the job on to all recorders."""
        self._each(lambda recorder: recorder.view(view, at))

    def end(self, view: JobView, at: float, lost: Mapping[int, int]) -> None:
        """Pass the job's last view on to all recorders, and warn if steps were not recorded.

        ``lost`` maps each instance to the number of its steps that were not recorded.
        """
        self.view(view, at)
        missing = [index for index, number in lost.items() if number]
        if missing:
            one = f"instance {missing[0]}"
            whose = one if len(missing) == 1 else f"{len(missing)} instances"
            total = sum(lost.values())
            were = "was" if total == 1 else "were"
            self._warn(f"{counted(total, 'step')} of {whose} {were} too quick to be recorded")

    def _each(self, pass_on: Callable[[Recorder], None]) -> None:
        for recorder in tuple(self._recorders):
            try:
                pass_on(recorder)
            # An error in a recorder must not end the job.
            except Exception as error:
                self._recorders.remove(recorder)
                self._warn(_failure_text(recorder, error))


def _failure_text(recorder: Recorder, error: Exception) -> str:
    problem = "the job continues, but its steps are no longer recorded"
    if isinstance(error, OSError):
        return explain_os_error(error, problem)
    return f"{problem} ({type(recorder).__name__}: {error!r})"
