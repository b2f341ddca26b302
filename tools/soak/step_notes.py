"""Notes of a training with losses: its processes and finished steps, and what each loss cost.

The notes are those of the first instance, which each number of instances has. Nothing here reads
a clock or starts a process.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Run:
    """One process of the first instance, from its start to the next start.

    Attributes:
        began: The time when the process started.
        phases: The first time of each kind of note except steps.
        steps: The finished steps, as pairs of a step's number and its time.
        digests: The digests of the weights, by step.
    """

    began: float
    phases: dict[str, float] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The cost of one loss.

    Attributes:
        seconds: The time from the loss to the next finished step that was not in progress.
        again: The number of finished steps that were computed again.
        restarts: The number of times that the programs started again before the next loss.
        phases: The seconds from the loss to each phase of the restarted program.
    """

    seconds: float
    again: int
    restarts: int
    phases: dict[str, float]


def read_notes(text: str) -> list[Run]:
    """Return the runs in the text of a notes file."""
    runs: list[Run] = []
    for line in text.splitlines():
        kind, step, seconds, *words = line.split()
        if kind == "start":
            runs.append(Run(float(seconds)))
            continue
        run = runs[-1]
        if kind == "step":
            run.steps.append((int(step), float(seconds)))
            continue
        run.phases.setdefault(kind, float(seconds))
        if kind in ("digest", "end"):
            run.digests[int(step)] = words[0]
    return runs


def cost(runs: Sequence[Run], loss: float, next_loss: float = float("inf")) -> Cost | None:
    """Return the cost of the loss at the time ``loss``; None while the training has not gone on.

    The first step that finishes after the loss may have been in progress. So without a restart,
    the training goes on when the step after that one finishes.
    """
    before = [run for run in runs if run.began <= loss and run.steps]
    if not before:
        return None
    old = before[-1]
    last_done = max((step for step, when in old.steps if when <= loss), default=0)
    # A process that started before the loss and has no step yet is a later attempt as well.
    later = [run for run in runs[runs.index(old) + 1 :] if run.began <= next_loss and run.steps]
    went_on = [when for step, when in old.steps if when > loss and step >= last_done + 2]
    went_on += [run.steps[0][1] for run in later]
    if not went_on:
        return None
    seconds = min(went_on)
    again = 0
    for one, other in pairwise([old, *later]):
        again += max(0, one.steps[-1][0] + 1 - other.steps[0][0])
    phases = {}
    if later:
        told = {"start": later[0].began, **later[0].phases, "step": later[0].steps[0][1]}
        phases = {
            kind: round(told[kind] - loss, 2)
            for kind in ("start", "imported", "connected", "resumed", "step")
            if kind in told
        }
    return Cost(round(seconds - loss, 3), again, len(later), phases)


def median_step(runs: Iterable[Run]) -> float:
    """Return the median time between two finished steps of one process, in seconds."""
    gaps = [
        later[1] - earlier[1]
        for run in runs
        for earlier, later in pairwise(run.steps)
        if later[0] == earlier[0] + 1
    ]
    return statistics.median(gaps)


def digests(runs: Iterable[Run]) -> dict[int, set[str]]:
    """Return all digests of the weights that the runs have noted, by step."""
    found: dict[int, set[str]] = {}
    for run in runs:
        for step, digest in run.digests.items():
            found.setdefault(step, set()).add(digest)
    return found


def steps_and_seconds(runs: Iterable[Run]) -> tuple[int, float]:
    """Return the number of steps that were finished at least once, and the time that they took.

    The time is from the first finished step to the last one. The first step only begins this time.
    """
    finished = [pair for run in runs for pair in run.steps]
    if not finished:
        return 0, 0.0
    times = [when for _, when in finished]
    return len({step for step, _ in finished}) - 1, max(times) - min(times)
