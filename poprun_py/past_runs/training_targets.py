"""Targets of a training, such as ``accuracy>=0.9``, and the time when a run reached a target."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from poprun_py.errors import UsageError
from poprun_py.past_runs.recorded_run import RecordedAttempt, RecordedRun

LOSS: Final = "loss"
_SPELLING: Final = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|=)\s*([^<>=\s]+)\s*")
# For values with these words in their names, smaller is better.
_SHRINKS: Final = ("loss", "error", "perplexity")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for the logged value ``name``.

    The value must be at most ``bound`` if ``at_most`` is true, and at least ``bound`` if not.
    """

    name: str
    bound: float
    at_most: bool = False

    def is_reached_by(self, value: float) -> bool:
        """Tell whether ``value`` reaches the target; NaN reaches no target."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.at_most else '>='}{self.bound:g}"


def parse_target(text: str) -> Target:
    """Parse ``NAME>=NUMBER``, ``NAME<=NUMBER`` or ``NAME=NUMBER``.

    ``NAME=NUMBER`` needs no quotes in a shell. ``NAME=NUMBER`` means ``NAME<=NUMBER`` if the name
    contains loss, error or perplexity, and ``NAME>=NUMBER`` for all other names.

    Raises:
        UsageError: The text does not have one of these forms.
    """
    match = _SPELLING.fullmatch(text)
    try:
        bound = float(match[3]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        raise UsageError(
            f"--target {text!r}: expected a name and a number, such as accuracy=0.9, loss=0.3, or "
            "in quotes 'loss<=0.3'"
        )
    name = match[1]
    shrinks = any(word in name.lower() for word in _SHRINKS)
    return Target(name, bound, at_most=match[2] == "<=" or (match[2] == "=" and shrinks))


def losses(attempt: RecordedAttempt) -> list[tuple[float, int, float]]:
    """Return the time, the step number and the loss (mean over instances) of each training step.

    The time is when the last instance completed the step, in seconds since the epoch. If the steps
    were recorded without a loss, the logged values with the name ``loss`` are used.
    """
    by_step: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in attempt.steps:
        if each.loss is not None:
            by_step[each.step].append((each.at, each.loss))
    found = [
        (max(at for at, _ in records), step, sum(loss for _, loss in records) / len(records))
        for step, records in by_step.items()
    ]
    return sorted(found or _logged(attempt, LOSS))


def reached_at(run: RecordedRun, target: Target) -> tuple[float | None, bool]:
    """Return the time when a run first reached a target, and whether the value was logged at all.

    The time is in seconds since the epoch; None if the target was not reached. The target's value
    is taken from the values that the program logged. If the program did not log ``loss``, the
    losses of the recorded steps are used.
    """
    found: list[tuple[float, int, float]] = []
    for attempt in run.attempts:
        logged = _logged(attempt, target.name)
        found += logged or (losses(attempt) if target.name == LOSS else [])
    times = (at for at, _, value in found if target.is_reached_by(value))
    return min(times, default=None), bool(found)


def _logged(attempt: RecordedAttempt, name: str) -> list[tuple[float, int, float]]:
    return [
        (each.at, each.step, each.values[name]) for each in attempt.values if name in each.values
    ]
