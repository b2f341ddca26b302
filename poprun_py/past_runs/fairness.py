"""What is to be said of runs that are compared: what is unfair or incomplete, and who was slow.

Pure: measured runs in, sentences out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from poprun_py.past_runs.measurement import Measured, Slowest
from poprun_py.running.watch.instance_state import median
from poprun_py.texts import milliseconds_text

_MOST_NAMED: Final = 3
_SAME: Final = 0.02


def remarks_on(runs: Sequence[Measured]) -> tuple[str, ...]:
    """Return what differs between runs beside their counts, and what of them is no whole run."""
    found = [
        _differing("not the same program", runs, lambda run: " ".join(run.program[:1])),
        _differing("not the same arguments", runs, lambda run: shlex.join(run.program[1:])),
        *_differing_versions(runs),
        _differing("not the same hosts", runs, lambda run: ",".join(run.hosts)),
        _differing("not the same number of steps", runs, lambda run: run.steps),
        *_other_batches(runs),
        *(_unfinished(run) for run in runs),
    ]
    return tuple(sentence for sentence in found if sentence)


def who_was_slow(runs: Sequence[Measured]) -> tuple[str, ...]:
    """Return which instance was slow, of the runs in which one stood out."""
    found: dict[tuple[object, ...], list[tuple[str, Slowest]]] = {}
    for run in runs:
        if run.slowest is not None:
            key = (run.program, run.instances, run.slowest.instance)
            found.setdefault(key, []).append((run.name, run.slowest))
    return tuple(
        f"instance {instance} of {count} is slow ({_names([name for name, _ in slow])}): "
        f"{milliseconds_text(median([each.own_seconds for _, each in slow]))} a step without "
        "waiting for others, the median is "
        f"{milliseconds_text(median([each.median_seconds for _, each in slow]))}"
        for (_, count, instance), slow in found.items()
    )


def _differing(what: str, runs: Sequence[Measured], key: Callable[[Measured], object]) -> str:
    """Return what differs, with the runs of each value; nothing if all are alike."""
    by_value: dict[object, list[str]] = {}
    for run in runs:
        by_value.setdefault(key(run), []).append(run.name)
    by_value.pop(None, None)  # not known
    if len(by_value) < 2:
        return ""
    shown = _short_paths([str(value) for value in by_value])
    parts = [
        f"{value or 'none'} ({_names(names)})"
        for value, names in zip(shown, by_value.values(), strict=True)
    ]
    return f"{what}: {', '.join(parts)}"


def _short_paths(values: Sequence[str]) -> list[str]:
    """Return paths by their names, where these tell them apart."""
    short = [PurePath(value).name if value.startswith("/") else value for value in values]
    return short if len(set(short)) == len(values) else list(values)


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _differing_versions(runs: Sequence[Measured]) -> list[str]:
    # Of a run that goes on, or was killed, not all versions are known.
    known = [run for run in runs if run.versions]
    common = set.intersection(*(set(run.versions) for run in known)) if known else set()

    def version_of(package: str) -> Callable[[Measured], object]:
        return lambda run: run.versions.get(package)

    return [
        _differing(f"not the same version of {package}", known, version_of(package))
        for package in sorted(common)
    ]


def _other_batches(runs: Sequence[Measured]) -> list[str]:
    """Return that runs of the same counts had other global batches."""
    by_counts: dict[tuple[int, int], dict[str, float]] = {}
    for run in runs:
        if run.batch is not None:
            by_counts.setdefault((run.instances, run.replicas), {})[run.name] = run.batch
    return [
        "not the same global batch: " + ", ".join(f"{b:g} ({name})" for name, b in batches.items())
        for batches in by_counts.values()
        if _differ(batches)
    ]


def _differ(batches: Mapping[str, float]) -> bool:
    return max(batches.values()) > min(batches.values()) * (1 + _SAME)


def _unfinished(run: Measured) -> str:
    if run.exit_code is None:
        return f"{run.name} has not ended"
    if run.exit_code:
        return f"{run.name} ended with exit code {run.exit_code}"
    if run.resumed_step:
        return f"{run.name} went on from a checkpoint of step {run.resumed_step}"
    if run.attempts > 1:
        return f"{run.name} needed {run.attempts} attempts; its seconds are those of all"
    return ""
