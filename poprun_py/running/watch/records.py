"""What is recorded of a job while it runs, and who takes it: files, an endpoint, other services.

Nothing here writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from poprun_py.running.watch.instance_state import loss_from_json, loss_to_json
from poprun_py.running.watch.job_view import JobView


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step of one instance.

    Attributes:
        at: when it ended, in seconds since the epoch, on the launcher's clock.
        instance: whose.
        step: its number: how many are done, those before a checkpoint resumed from included.
        seconds: from the end of the step before; compiling, validating and saving do not count.
            0 for a program's first step: nobody knows when it began.
        own_seconds: of these, without waiting for other instances.
        samples: that the instance trained on in it; 0 where nobody knows.
        loss: of the step; None where nobody knows.
        every: of so many steps this one was kept.
    """

    at: float
    instance: int
    step: int
    seconds: float
    own_seconds: float
    samples: int = 0
    loss: float | None = None
    every: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the record as the line of a file; what is not known is left out."""
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
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
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


class Recorder(Protocol):
    """Takes what a job does, in the supervisor's loop: it must not wait, and raises nothing."""

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Take steps of one instance that have ended, in order, each once."""

    def look(self, view: JobView, at: float, /) -> None:
        """Take a look at all instances, and when it was, in seconds since the epoch."""
