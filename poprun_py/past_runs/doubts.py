"""The reasons why figures of a comparison cannot be trusted, from the conditions of its runs.

A figure with a doubt may be right. A doubt names another possible cause of the figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from popdist_py.errors import counted
from poprun_py.past_runs.run_conditions import Conditions

# Other programs and CPU limits of less than this fraction do not change figures noticeably.
_LEAST_LOAD, _LEAST_THROTTLED = 0.1, 0.05
# A median of fewer steps depends on single steps.
_LEAST_STEPS: Final = 10
# An efficiency above this seldom comes from the additional instances.
_MOST_EFFICIENCY: Final = 1.1
# Repetitions of one job that differ by more than this fraction are not repetitions.
_MOST_SPREAD: Final = 0.1
# A speedup that differs less from 1 is shown as 1.00x, so that it claims no difference.
_NO_DIFFERENCE: Final = 0.005
_MOST_NAMED: Final = 4


class Cause(Enum):
    """The causes of doubts. Tables show their lines in this order.

    A value contains the name of the cause in JSON, its sentence on the screen, and a hint. The runs
    follow the sentence, each with a detail.
    """

    LOAD = ("other_load", "other programs used CPUs of the job", "")
    SHARED = ("shared_cores", "other jobs used the same cores", "")
    CROWDED = ("crowded_cpus", "several instances share a CPU", "")
    LIMITED = ("cpu_limit", "a limit of CPU time stopped an instance", "")
    THREADS = (
        "threads",
        "the instances of the runs have different numbers of threads",
        "--cores-per-instance makes the numbers equal",
    )
    EFFICIENCY = (
        "efficiency",
        "an efficiency over 110 % is seldom real",
        "check whether other programs disturbed the first run",
    )
    STEPS = ("few_steps", "too few steps were timed", "let the program make more steps")
    REPEATS = ("spread", "the repetitions of a run differ much", "")
    DIFFERENCE = (
        "small_difference",
        "the variation of a run is larger than the difference between the runs",
        "",
    )

    @property
    def key(self) -> str:
        """The name of the cause in JSON."""
        return self.value[0]

    @property
    def sentence(self) -> str:
        """The cause in words."""
        return self.value[1]

    @property
    def hint(self) -> str:
        """A hint for the user, such as an option; empty for most causes."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason to doubt the figures of a group of runs, with a detail such as ``0.8 of 2 CPUs``."""

    cause: Cause
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the doubt as a JSON object."""
        detail = f": {self.detail}" if self.detail else ""
        return {"cause": self.cause.key, "reason": f"{self.cause.sentence}{detail}"}


def doubts_of_runs(runs: Sequence[Conditions], speeds: Sequence[float] = ()) -> list[Doubt]:
    """Return the doubts about the speed of one run, or of repetitions of one run.

    Args:
        runs: The conditions of each run.
        speeds: The known speeds of the runs.
    """
    found = []
    loads = [(each.cpus_of_others or 0.0, each.num_cpus) for each in runs]
    others, cpus = max(loads, key=lambda load: load[0] / (load[1] or 1))
    if cpus and others / cpus >= _LEAST_LOAD:
        found.append(Doubt(Cause.LOAD, f"{others:.2g} of {cpus}"))
    if any(each.shares_cores for each in runs):
        found.append(Doubt(Cause.SHARED))
    if (most := max(each.instances_per_cpu for each in runs)) > 1:
        found.append(Doubt(Cause.CROWDED, f"{most} on one CPU"))
    if (throttled := max(each.throttled or 0.0 for each in runs)) >= _LEAST_THROTTLED:
        found.append(Doubt(Cause.LIMITED, f"{throttled:.0%} of the time"))
    counts = [each.num_steps for each in runs if each.num_steps is not None]
    if counts and min(counts) < _LEAST_STEPS:
        found.append(Doubt(Cause.STEPS, counted(min(counts), "step")))
    if (spread := spread_of(speeds)) > _MOST_SPREAD:
        found.append(Doubt(Cause.REPEATS, f"by {spread:.0%}"))
    return found


def doubts_of_comparison(
    own: Sequence[Conditions],
    base: Sequence[Conditions],
    *,
    speeds: tuple[Sequence[float], Sequence[float]],
    speedup: float | None,
    efficiency: float | None,
) -> list[Doubt]:
    """Return the doubts about the comparison of one group of runs with the base group.

    Args:
        own: The conditions of the group's runs.
        base: The conditions of the base group's runs.
        speeds: The speeds of the group's runs and of the base group's runs.
        speedup: The median speed of the group, divided by that of the base group.
        efficiency: The scaling efficiency; None if the groups have equally many instances.
    """
    found = []
    threads, before = _threads(own), _threads(base)
    if threads and before and threads != before:
        found.append(Doubt(Cause.THREADS, f"{threads} instead of {before}"))
    if efficiency is not None and efficiency > _MOST_EFFICIENCY:
        found.append(Doubt(Cause.EFFICIENCY, f"{efficiency:.0%}"))
    if speedup is not None and (difference := abs(speedup - 1)) > _NO_DIFFERENCE:
        variation = max(map(spread_of, speeds))
        if min(map(len, speeds)) < 2:  # without repetitions, only the steps tell
            variation = max((each.step_variation or 0.0 for each in (*own, *base)), default=0.0)
        if difference < variation:
            detail = f"{_percent(variation)} against {_percent(difference)}"
            found.append(Doubt(Cause.DIFFERENCE, detail))
    return found


def spread_of(values: Sequence[float]) -> float:
    """Return the distance of the least and the largest value, as a fraction of their mean."""
    mean = sum(values) / len(values) if values else 0.0
    return (max(values) - min(values)) / mean if mean > 0 else 0.0


def doubt_lines(groups: Iterable[tuple[str, Sequence[Doubt]]]) -> list[str]:
    """Return one line for each cause of doubts, with all groups of runs that it concerns.

    ``groups`` are the labels of the groups, each with its doubts.
    """
    named = list(groups)
    lines = []
    for cause in Cause:
        found = [(label, each) for label, doubts in named for each in doubts if each.cause is cause]
        if found:
            parts = [f"{each.detail} ({label})" if each.detail else label for label, each in found]
            hint = f"; {cause.hint}" if cause.hint else ""
            lines.append(f"{cause.sentence}: {_listed(parts)}{hint}")
    return lines


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _MOST_NAMED
    return ", ".join(parts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _threads(runs: Sequence[Conditions]) -> str:
    return ", ".join(map(str, sorted({number for each in runs for number in each.threads})))


def _percent(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
