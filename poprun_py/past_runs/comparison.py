"""Runs side by side: which is how much faster than the first one, and whether that is fair.

Speeds are compared by what all runs have: samples per second, else steps per second, else the
seconds of the whole run. The speedup of a run is its speed in parts of the first run's, its scaling
efficiency the speedup in parts of how many times the instances (or replicas) it had. With steps
whose samples nobody counted, each step is taken to train every replica on equally many; with whole
runs, each is taken to do the same work.

Pure: measured runs in, values out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.errors import counted
from poprun_py.past_runs.measurement import Measured
from poprun_py.past_runs.targets import Target

SAMPLES: Final = "samples/s"
STEPS: Final = "steps/s"
SECONDS: Final = "seconds"

# Batches that differ by less were cut differently at the end of an epoch.
_SAME: Final = 0.02
_VERSION: Final = 1
NUMBERS: Final = (
    "samples_per_second",
    "batch",
    "step_seconds",
    "p95_seconds",
    "seconds",
    "loss",
    "reached",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of several runs."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value; of an even count the mean of the two in the middle."""
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return sum(self.values) / len(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)

    def to_json(self) -> dict[str, float | None]:
        """Return the spread for programs; what is no number, as a loss may be, is None."""
        found = {
            "median": self.median,
            "mean": self.mean,
            "min": self.least,
            "max": self.most,
        }
        shown = {name: v if math.isfinite(v) else None for name, v in found.items()}
        return {**shown, "runs": len(self.values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run, or repetitions of one, with the numbers by field of ``Measured``.

    ``speed`` is what speedups are made of; it, the speedup and the efficiencies are None where the
    runs, or the first ones, have no such number.
    """

    runs: tuple[Measured, ...]
    numbers: Mapping[str, Spread]
    speed: Spread | None
    speedup: float | None
    efficiency: float | None
    efficiency_by_replicas: float | None

    @property
    def label(self) -> str:
        """The name of the run, or of the first repetition and how many more there are."""
        more = len(self.runs) - 1
        return f"{self.runs[0].name} + {more}" if more else self.runs[0].name

    @property
    def instances(self) -> int:
        """How many instances each of the runs had."""
        return self.runs[0].instances

    @property
    def replicas(self) -> int:
        """How many replicas each of the runs had."""
        return self.runs[0].replicas

    @property
    def missing(self) -> dict[str, str]:
        """Why numbers are missing that none of the runs has, by field."""
        return {
            name: self.runs[0].missing.get(name, "")
            for name in NUMBERS
            if name not in self.numbers and name in self.runs[0].missing
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs against the first one of them.

    Attributes:
        entries: the runs; the first is the base.
        measure: what speeds are compared by: ``SAMPLES``, ``STEPS`` or ``SECONDS``.
        scaling: ``strong`` where the global batch stayed while instances or replicas changed,
            ``weak`` where it grew with either; empty where neither can be said.
        target: whose time was measured.
        remarks: what makes the comparison unfair or incomplete, in words.
    """

    entries: tuple[Entry, ...]
    measure: str
    scaling: str = ""
    target: Target | None = None
    remarks: tuple[str, ...] = ()

    @property
    def base(self) -> Entry:
        """What the others are compared with."""
        return self.entries[0]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison for programs."""
        return {
            "version": _VERSION,
            "measure": self.measure,
            "scaling": self.scaling or None,
            "target": None if self.target is None else str(self.target),
            "remarks": list(self.remarks),
            "runs": [_entry_json(each) for each in self.entries],
        }


def compare(
    runs: Sequence[Measured],
    *,
    target: Target | None = None,
    grouped: bool = False,
    remarks: Sequence[str] = (),
) -> Comparison:
    """Compare runs with the first one.

    Args:
        runs: at least one.
        target: whose time they measured.
        grouped: take runs of the same program, arguments, counts and hosts as repetitions of one.
        remarks: what else is to be said of the comparison.
    """
    groups = _groups(runs) if grouped else [(run,) for run in runs]
    measure = _common_measure(runs)
    made = [(group, _speed(group, measure)) for group in groups]
    base, base_speed = made[0]
    entries = tuple(_entry(group, speed, base[0], base_speed) for group, speed in made)
    return Comparison(
        entries=entries,
        measure=measure,
        scaling=_scaling(entries),
        target=target,
        remarks=(*remarks, *_seldom_reached(entries, target)),
    )


def _seldom_reached(entries: Sequence[Entry], target: Target | None) -> list[str]:
    """Return of which repetitions only some reached the target: the time is that of these."""
    found = []
    for entry in entries:
        reached = len(entry.numbers["reached"].values) if "reached" in entry.numbers else 0
        if target is not None and 0 < reached < len(entry.runs):
            found.append(
                f"{entry.label}: {reached} of {counted(len(entry.runs), 'run')} reached {target}"
            )
    return found


def _groups(runs: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    """Return the runs by what they ran, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for run in runs:
        key = (run.program, run.instances, run.replicas, run.hosts)
        groups.setdefault(key, []).append(run)
    return [tuple(group) for group in groups.values()]


def _common_measure(runs: Sequence[Measured]) -> str:
    """Return what all runs that tell anything of their speed have."""
    told = [run for run in runs if run.step_seconds is not None]
    if told and all(run.samples_per_second is not None for run in told):
        return SAMPLES
    return STEPS if told else SECONDS


_SPEEDS: Final[Mapping[str, Callable[[Measured], float | None]]] = {
    SAMPLES: lambda run: run.samples_per_second,
    STEPS: lambda run: run.replicas / run.step_seconds if run.step_seconds else None,
    SECONDS: lambda run: 1 / run.seconds if run.seconds and run.seconds > 0 else None,
}


def _speed(group: Sequence[Measured], measure: str) -> Spread | None:
    found = tuple(speed for run in group if (speed := _SPEEDS[measure](run)) is not None)
    return Spread(found) if found else None


def _entry(
    group: tuple[Measured, ...], speed: Spread | None, base: Measured, base_speed: Spread | None
) -> Entry:
    numbers = {
        name: Spread(values)
        for name in NUMBERS
        if (values := tuple(v for run in group if (v := getattr(run, name)) is not None))
    }
    is_known = speed is not None and base_speed is not None and base_speed.median > 0
    speedup = speed.median / base_speed.median if is_known and speed and base_speed else None
    first = group[0]
    return Entry(
        runs=group,
        numbers=numbers,
        speed=speed,
        speedup=speedup,
        efficiency=None if speedup is None else speedup * base.instances / first.instances,
        efficiency_by_replicas=None
        if speedup is None
        else speedup * base.replicas / first.replicas,
    )


def _scaling(entries: Sequence[Entry]) -> str:
    """Return how the global batch changed while the counts did."""
    base = entries[0]
    others = [e for e in entries if (e.instances, e.replicas) != (base.instances, base.replicas)]
    if not others or any("batch" not in each.numbers for each in (base, *others)):
        return ""
    first = base.numbers["batch"].median
    kinds = set()
    for each in others:
        grown = each.numbers["batch"].median / first
        factors = (each.instances / base.instances, each.replicas / base.replicas)
        if abs(grown - 1) <= _SAME:
            kinds.add("strong")
        elif any(abs(grown / factor - 1) <= _SAME for factor in factors):
            kinds.add("weak")
        else:
            kinds.add("")
    return kinds.pop() if len(kinds) == 1 else ""


def _entry_json(entry: Entry) -> dict[str, Any]:
    first = entry.runs[0]
    numbers = {
        name: entry.numbers[name].to_json() if name in entry.numbers else None for name in NUMBERS
    }
    return {
        "runs": [run.name for run in entry.runs],
        "program": list(first.program),
        "hosts": list(first.hosts),
        "num_instances": entry.instances,
        "num_replicas": entry.replicas,
        **numbers,
        "speedup": entry.speedup,
        "efficiency": entry.efficiency,
        "efficiency_by_replicas": entry.efficiency_by_replicas,
        "missing": entry.missing,
    }
