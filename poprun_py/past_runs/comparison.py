"""Comparison of the speed of several runs: speedup and scaling efficiency against the first run.

If every run with training steps counts its samples, speed is measured in samples per second. If a
run with training steps does not count its samples, speed is measured in steps per second, and each
step is assumed to train each replica on the same number of samples. If no run counts steps, speed
is computed from the duration of the whole run, and all runs are assumed to do the same work.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Any, Final

from popdist_py.errors import counted
from poprun_py.display.formatting import milliseconds_text
from poprun_py.past_runs.doubts import Doubt, doubts_of_comparison, doubts_of_runs
from poprun_py.past_runs.measured_run import Measured, Target
from poprun_py.running.watch.instance_state import median
from poprun_py.running.watch.stragglers import Straggler

# Two global batches count as equal if they differ by at most this fraction, because the last batch
# of an epoch may be incomplete.
_BATCH_TOLERANCE: Final = 0.02
_MOST_NAMED: Final = 3
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
class Measure:
    """A measure of speed, with its name in JSON, description for users and unit in charts."""

    name: str
    description: str
    unit: str
    speed_of: Callable[[Measured], float | None]


SAMPLES: Final = Measure(
    "samples/s",
    "samples per second of all instances, without the first steps of each instance",
    "samples/s",
    lambda run: run.samples_per_second,
)
STEPS: Final = Measure(
    "steps/s",
    "steps per second; the number of samples in a step is unknown, so it is assumed to be the "
    "same on each replica",
    "steps/s of all replicas",
    lambda run: run.replicas / run.mean_step_seconds if run.mean_step_seconds else None,
)
SECONDS: Final = Measure(
    "seconds",
    "the duration of the whole run, because no run counts steps; all runs are assumed to do the "
    "same work",
    "s",
    lambda run: 1 / run.seconds if run.seconds and run.seconds > 0 else None,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one measured quantity, such as the loss, in several runs."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Create a spread from values, except None; return None if all values are None."""
        known = tuple(each for each in values if each is not None)
        return cls(known) if known else None

    @property
    def median(self) -> float:
        """The median of the quantity over all runs."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The smallest value of the quantity in the runs."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest value of the quantity in the runs."""
        return max(self.values)

    def to_json(self) -> dict[str, float | None]:
        """Return the median, mean, minimum and maximum as JSON; None replaces NaN and infinity."""
        mean = sum(self.values) / len(self.values)
        found = {"median": self.median, "mean": mean, "min": self.least, "max": self.most}
        shown = {name: v if math.isfinite(v) else None for name, v in found.items()}
        return {**shown, "runs": len(self.values)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGroup:
    """One run, or several runs that are repetitions of the same job.

    Attributes:
        numbers: The values of each measured quantity, keyed by the fields of ``Measured``.
        speed: The speed of each run, measured by ``Comparison.measure``; None if no speed is known.
        speedup: The median speed of the group, divided by the median speed of the base group; None
            if one of the two speeds is unknown.
        efficiency: The scaling efficiency, which is the speedup divided by the factor by which the
            number of instances has grown.
        efficiency_by_replicas: The scaling efficiency, computed from replicas instead of instances.
        doubts: The reasons why the group's own speed, or its difference from the base group, cannot
            be trusted.
    """

    runs: tuple[Measured, ...]
    numbers: Mapping[str, Spread]
    speed: Spread | None
    speedup: float | None = None
    efficiency: float | None = None
    efficiency_by_replicas: float | None = None
    doubts: tuple[Doubt, ...] = ()

    @property
    def label(self) -> str:
        """The name of the group's first run, followed by ``+ N`` if the group has N more runs."""
        more = len(self.runs) - 1
        return f"{self.runs[0].name} + {more}" if more else self.runs[0].name

    @property
    def instances(self) -> int:
        """The number of instances in each run of the group."""
        return self.runs[0].instances

    @property
    def replicas(self) -> int:
        """The number of replicas in each run of the group."""
        return self.runs[0].replicas

    @property
    def missing(self) -> dict[str, str]:
        """The reasons why fields of ``Measured`` are unknown in all runs, keyed by the fields."""
        reasons = self.runs[0].missing.items()
        return {name: why for name, why in reasons if name in NUMBERS and name not in self.numbers}

    def to_json(self) -> dict[str, Any]:
        """Return the group of runs as a JSON object."""
        numbers = {
            name: self.numbers[name].to_json() if name in self.numbers else None for name in NUMBERS
        }
        return {
            "runs": [run.name for run in self.runs],
            "program": list(self.runs[0].program),
            "hosts": list(self.runs[0].hosts),
            "num_instances": self.instances,
            "num_replicas": self.replicas,
            **numbers,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "efficiency_by_replicas": self.efficiency_by_replicas,
            "doubts": [doubt.to_json() for doubt in self.doubts],
            "missing": self.missing,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A comparison of groups of runs with the first group.

    Attributes:
        scaling: The kind of scaling: ``strong`` if the number of instances or replicas changes, but
            the global batch does not; ``weak`` if the global batch grows in proportion to the
            number of instances or replicas; empty in all other cases.
        target: The training target that the user gave, such as ``loss<=0.3``; None without a
            target.
        remarks: Sentences about differences between the runs that make the comparison unfair.
    """

    groups: tuple[RunGroup, ...]
    measure: Measure
    scaling: str = ""
    target: Target | None = None
    remarks: tuple[str, ...] = ()

    @property
    def base(self) -> RunGroup:
        """The first group of runs, with which all groups are compared."""
        return self.groups[0]

    def is_doubtful(self, group: RunGroup) -> bool:
        """Return whether there are doubts about the speedup and the efficiency of ``group``.

        Doubts about the base group are doubts about all groups, which are compared with it.
        """
        return bool(group.doubts or self.base.doubts)

    def ideal_speedup(self, group: RunGroup) -> float:
        """Return the speedup that ``group`` would have at a scaling efficiency of 100 %."""
        return group.instances / self.base.instances

    def shown_speed(self, group: RunGroup) -> Spread | None:
        """Return the speeds of the group's runs; if no run counts steps, return their durations."""
        return group.numbers.get("seconds") if self.measure is SECONDS else group.speed

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return {
            "version": _VERSION,
            "measure": self.measure.name,
            "scaling": self.scaling or None,
            "target": None if self.target is None else str(self.target),
            "remarks": list(self.remarks),
            "runs": [each.to_json() for each in self.groups],
        }


def compare(
    runs: Sequence[Measured],
    *,
    target: Target | None = None,
    grouped: bool = False,
    remarks: Sequence[str] = (),
) -> Comparison:
    """Compare the speed of one or more runs with the speed of the first run.

    If ``grouped`` is true, runs with the same program, arguments, hosts, and numbers of instances
    and replicas form a group of repetitions.
    """
    measure = _common_measure(runs)
    groups: list[RunGroup] = []
    for repetitions in _repetitions(runs) if grouped else [(run,) for run in runs]:
        groups.append(_run_group(repetitions, measure, groups[0] if groups else None))
    return Comparison(
        groups=tuple(groups),
        measure=measure,
        scaling=_scaling(groups),
        target=target,
        remarks=(*remarks, *_partly_reached(groups, target)),
    )


def _partly_reached(groups: Sequence[RunGroup], target: Target | None) -> list[str]:
    found = []
    for group in groups:
        reached = group.numbers.get("reached")
        if reached is not None and len(reached.values) < len(group.runs):
            runs = counted(len(group.runs), "run")
            found.append(f"{group.label}: {len(reached.values)} of {runs} reached {target}")
    return found


def _repetitions(runs: Sequence[Measured]) -> list[tuple[Measured, ...]]:
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for run in runs:
        key = (run.program, run.instances, run.replicas, run.hosts)
        groups.setdefault(key, []).append(run)
    return [tuple(group) for group in groups.values()]


def _common_measure(runs: Sequence[Measured]) -> Measure:
    with_steps = [run for run in runs if run.step_seconds is not None]
    if with_steps and all(run.samples_per_second is not None for run in with_steps):
        return SAMPLES
    return STEPS if with_steps else SECONDS


def _run_group(runs: tuple[Measured, ...], measure: Measure, base: RunGroup | None) -> RunGroup:
    """Create a group of runs, with its speedup over ``base``; the first group is its own base."""
    spreads = {name: Spread.of(getattr(run, name) for run in runs) for name in NUMBERS}
    group = RunGroup(
        runs=runs,
        numbers={name: spread for name, spread in spreads.items() if spread is not None},
        speed=Spread.of(map(measure.speed_of, runs)),
    )
    own_doubts = doubts_of_runs([run.conditions for run in runs], _speeds(group))
    group = replace(group, doubts=tuple(own_doubts))
    base = base or group
    if group.speed is None or base.speed is None or base.speed.median <= 0:
        return group
    speedup = group.speed.median / base.speed.median
    if not math.isfinite(speedup):  # a damaged file of a run may contain NaN
        return group
    efficiency = speedup * base.instances / group.instances
    doubts = doubts_of_comparison(
        [run.conditions for run in runs],
        [run.conditions for run in base.runs],
        speeds=(_speeds(group), _speeds(base)),
        speedup=speedup,
        efficiency=efficiency if group.instances != base.instances else None,
    )
    return replace(
        group,
        speedup=speedup,
        efficiency=efficiency,
        efficiency_by_replicas=speedup * base.replicas / group.replicas,
        doubts=(*own_doubts, *doubts),
    )


def _speeds(group: RunGroup) -> tuple[float, ...]:
    return () if group.speed is None else group.speed.values


def _scaling(groups: Sequence[RunGroup]) -> str:
    base = groups[0]
    size = (base.instances, base.replicas)
    others = [each for each in groups if (each.instances, each.replicas) != size]
    if not others or any("batch" not in each.numbers for each in (base, *others)):
        return ""
    first = base.numbers["batch"].median
    kinds = set()
    for each in others:
        grown = each.numbers["batch"].median / first
        factors = (each.instances / base.instances, each.replicas / base.replicas)
        if abs(grown - 1) <= _BATCH_TOLERANCE:
            kinds.add("strong")
        elif any(abs(grown / factor - 1) <= _BATCH_TOLERANCE for factor in factors):
            kinds.add("weak")
        else:
            kinds.add("")
    return kinds.pop() if len(kinds) == 1 else ""


# --- remarks on unfair comparisons --------------------------------------------------------------


def remarks_on(runs: Sequence[Measured]) -> tuple[str, ...]:
    """Return sentences about incomplete runs and about differences that make a comparison unfair.

    No sentence mentions different numbers of instances and replicas, because these are expected.
    """
    found = [
        _differing("different programs", runs, lambda run: " ".join(run.program[:1])),
        _differing("different arguments", runs, lambda run: shlex.join(run.program[1:])),
        *_differing_versions(runs),
        _differing("different hosts", runs, lambda run: ",".join(run.hosts)),
        _differing("different numbers of steps", runs, lambda run: run.steps),
        *_other_batches(runs),
        *(_unfinished(run) for run in runs),
    ]
    return tuple(sentence for sentence in found if sentence)


def slow_instances(runs: Sequence[Measured]) -> tuple[str, ...]:
    """Return a sentence for each instance that was much slower than other instances of its run."""
    found: dict[tuple[object, ...], list[tuple[str, Straggler]]] = {}
    for run in runs:
        if run.slowest is not None:
            key = (run.program, run.instances, run.slowest.instance)
            found.setdefault(key, []).append((run.name, run.slowest))
    return tuple(
        f"instance {instance} of {count} is slow ({_names([name for name, _ in slow])}): a step "
        f"takes {milliseconds_text(median([each.own_seconds for _, each in slow]))} without "
        "waiting for other instances, and "
        f"{milliseconds_text(median([each.median_seconds for _, each in slow]))} in the median "
        "instance"
        for (_, count, instance), slow in found.items()
    )


def _differing(what: str, runs: Sequence[Measured], key: Callable[[Measured], object]) -> str:
    """Return a sentence with each value of ``key`` and its runs; empty if all values are equal."""
    by_value: dict[object, list[str]] = {}
    for run in runs:
        by_value.setdefault(key(run), []).append(run.name)
    by_value.pop(None, None)  # leave out runs whose value is unknown
    if len(by_value) < 2:
        return ""
    shown = _short_paths([str(value) for value in by_value])
    parts = [
        f"{value or 'none'} ({_names(names)})"
        for value, names in zip(shown, by_value.values(), strict=True)
    ]
    return f"{what}: {', '.join(parts)}"


def _short_paths(values: Sequence[str]) -> list[str]:
    """Shorten absolute paths to their file names, unless two values would become equal."""
    short = [PurePath(value).name if value.startswith("/") else value for value in values]
    return short if len(set(short)) == len(values) else list(values)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _differing_versions(runs: Sequence[Measured]) -> list[str]:
    # Compare only the versions of packages that every report names, because the report of a running
    # or killed run lacks some packages.
    known = [run for run in runs if run.versions]
    common = set.intersection(*(set(run.versions) for run in known)) if known else set()
    found = []
    for name in sorted(common):
        version_of = partial(lambda package, run: run.versions[package], name)
        found.append(_differing(f"different versions of {name}", known, version_of))
    return found


def _other_batches(runs: Sequence[Measured]) -> list[str]:
    by_counts: dict[tuple[int, int], dict[str, float]] = {}
    for run in runs:
        if run.batch is not None:
            by_counts.setdefault((run.instances, run.replicas), {})[run.name] = run.batch
    return [
        "different global batches: " + ", ".join(f"{b:g} ({name})" for name, b in batches.items())
        for batches in by_counts.values()
        if max(batches.values()) > min(batches.values()) * (1 + _BATCH_TOLERANCE)
    ]


def _unfinished(run: Measured) -> str:
    if run.exit_code is None:
        return f"{run.name} has not ended"
    if run.exit_code:
        return f"{run.name} ended with exit code {run.exit_code}"
    if run.resumed_step:
        return f"{run.name} continued from the checkpoint of step {run.resumed_step}"
    if run.attempts > 1:
        return f"{run.name} needed {run.attempts} attempts; its duration includes all of them"
    return ""
