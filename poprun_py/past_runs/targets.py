"""A target that training is to reach, such as ``accuracy>=0.9``, and when a run reached it.

Pure: words and a run's records in, values out.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from poprun_py.errors import UsageError
from poprun_py.past_runs.recorded_run import RecordedAttempt, RecordedRun

LOSS: Final = "loss"
_SPELLING: Final = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|=)\s*([^<>=\s]+)\s*")
# What is better the smaller it is, where the user does not say.
_SHRINKS: Final = ("loss", "error", "perplexity")


@dataclass(frozen=True, slots=True)
class Target:
    """A number of this name that is at least ``bound``, or at most."""

    name: str
    bound: float
    at_most: bool = False

    def is_reached_by(self, value: float) -> bool:
        """Tell whether ``value`` is good enough; what is no number never is."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.at_most else '>='}{self.bound:g}"


def parse_target(text: str) -> Target:
    """Return the target that a user spells.

    Args:
        text: ``NAME>=NUMBER``, ``NAME<=NUMBER``, or ``NAME=NUMBER``, which needs no quotes in a
            shell: at most NUMBER where the name holds loss, error or perplexity, else at least.

    Raises:
        UsageError: it is something else.
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
    """Return of each training step the time, its number, and the mean loss of the instances.

    The time is when the last instance ended the step, in seconds since the epoch. Where steps have
    no loss, values of that name which the program logged stand for them.
    """
    by_step: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in attempt.steps:
        if each.loss is not None:
            by_step[each.step].append((each.at, each.loss))
    found = [
        (max(at for at, _ in those), step, sum(loss for _, loss in those) / len(those))
        for step, those in by_step.items()
    ]
    return sorted(found or _logged(attempt, LOSS))


def reached_at(run: RecordedRun, target: Target) -> tuple[float | None, bool]:
    """Return when a run reached a target first, over all attempts, and whether it was measured.

    What the program logged under the name counts; for ``loss``, where it logged none, the loss of
    the steps. The time is in seconds since the epoch; None if the run never got there.
    """
    found: list[tuple[float, int, float]] = []
    for attempt in run.attempts:
        logged = _logged(attempt, target.name)
        found += logged or (losses(attempt) if target.name == LOSS else [])
    times = (at for at, _, value in found if target.is_reached_by(value))
    return _first(times), bool(found)


def _logged(attempt: RecordedAttempt, name: str) -> list[tuple[float, int, float]]:
    return [
        (each.at, each.step, each.values[name]) for each in attempt.values if name in each.values
    ]


def _first(times: Iterable[float]) -> float | None:
    return min(times, default=None)
