"""A run as its files tell: the report, and what was recorded of each attempt.

The last line of a file may be half a line: its writer was killed. What cannot be read is left out,
and named in ``troubles``. Of a long run some steps and looks are read, evenly, so that neither time
nor memory grows without end. Nothing here draws or compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from popdist_py.errors import counted
from poprun_py.errors import UsageError
from poprun_py.past_runs.run_files import AttemptFiles, RunFiles
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord
from poprun_py.texts import read_json

# What code raises that computes with values which no launcher has written.
NOT_A_RUN: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_Read = TypeVar("_Read")
# Of one attempt; of looks, the instances in all of them.
_MOST_STEPS: Final = 100_000
_MOST_STATES, _LEAST_LOOKS = 20_000, 100
_STEP: Final = re.compile(r'"step": ?(\d+)')


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """What the program logged at one step with ``popdist_py.Metrics``, ``at`` since the epoch."""

    at: float
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAttempt:
    """One attempt.

    Attributes:
        number: from 1.
        report: its part of report.json.
        plan: plan.json; None if it is not there.
        steps: the training steps, by time; of very many every so many-th, as ``every`` tells.
        looks: times since the epoch, with the view of all instances; of very many some, evenly.
        values: what the program logged, by time.
        devices: by instance, what the model of the device says.
        outputs: by instance, the names of the files with what it wrote; empty ones are left out.
    """

    number: int
    report: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    steps: tuple[StepRecord, ...] = ()
    looks: tuple[tuple[float, JobView], ...] = ()
    values: tuple[LoggedValues, ...] = ()
    devices: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    outputs: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run: its files, its report, its attempts, and what could not be read, in words."""

    files: RunFiles
    report: Mapping[str, Any]
    attempts: tuple[RecordedAttempt, ...]
    troubles: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return str(self.report["run_id"])


def read_run(files: RunFiles) -> RecordedRun:
    """Read a run, also one that has not ended.

    Raises:
        UsageError: its report cannot be read.
    """
    troubles: list[str] = []
    try:
        report = read_json(files.report.read_bytes())
        reports = {each["number"]: each for each in report["attempts"]}
        report["run_id"], report["plan"]["num_instances"]
    except OSError as error:
        raise UsageError(f"{files.report} is no report of a run ({error.strerror})") from None
    except NOT_A_RUN as error:
        raise no_report(files, error) from None
    attempts = tuple(
        _read_attempt(each, reports.get(each.number, {}), troubles) for each in files.attempts()
    )
    return RecordedRun(files=files, report=report, attempts=attempts, troubles=tuple(troubles))


def no_report(files: RunFiles, error: Exception) -> UsageError:
    """Return the refusal of a run whose report says what no report does."""
    why = str(error) if type(error) is ValueError else repr(error)
    return UsageError(f"{files.report} is no report of a run ({why:.200}); was it edited?")


def moment_of(text: object) -> float | None:
    """Return a time that a report names, in seconds since the epoch; None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _read_attempt(
    files: AttemptFiles, report: Mapping[str, Any], troubles: list[str]
) -> RecordedAttempt:
    steps = _steps(files.steps, troubles)
    values = [each for path in files.values() for each in _lines(path, _values, troubles)]
    return RecordedAttempt(
        number=files.number,
        report=report,
        plan=_document(files.plan, troubles),
        steps=tuple(sorted(steps, key=lambda each: (each.at, each.instance))),
        looks=tuple(_looks(files.looks, troubles)),
        values=tuple(sorted(values, key=lambda each: each.at)),
        devices={
            _instance(path): document
            for path in files.devices()
            if (document := _document(path, troubles)) is not None
        },
        outputs=_outputs(files),
    )


def _instance(path: Path) -> int:
    """Return whose file this is."""
    return int(path.name.removeprefix("instance-").partition(".")[0])


def _outputs(files: AttemptFiles) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in files.outputs():
        found.setdefault(_instance(path), []).append(path.name)
    return found


def _steps(path: Path, troubles: list[str]) -> list[StepRecord]:
    """Return the steps of an attempt, of very many those whose number can be divided evenly."""
    kept: list[StepRecord] = []
    every, most = 1, _MOST_STEPS

    def is_kept(line: str) -> bool:
        number = _STEP.search(line) if every > 1 else None
        return number is None or int(number[1]) % every == 0

    for record in _lines(path, StepRecord.from_json, troubles, is_kept):
        kept.append(record)
        if len(kept) > most:
            every *= 2
            kept = [each for each in kept if each.step % every == 0]
            most = max(_MOST_STEPS, 2 * len(kept))  # numbers may all be alike
    return [each if each.every >= every else replace(each, every=every) for each in kept]


def _looks(path: Path, troubles: list[str]) -> list[tuple[float, JobView]]:
    """Return the looks of an attempt, of very many every so many-th."""
    kept: list[tuple[float, JobView]] = []
    every, count = 1, 0

    def is_kept(_line: str) -> bool:
        nonlocal count
        count += 1
        return (count - 1) % every == 0

    for look in _lines(path, _look, troubles, is_kept):
        kept.append(look)
        if len(kept) > max(_MOST_STATES // (len(look[1].instances) or 1), _LEAST_LOOKS):
            every *= 2
            kept = kept[::2]
    return kept


def _look(data: Mapping[str, Any]) -> tuple[float, JobView]:
    return float(data["at"]), JobView.from_json(data)


def _values(data: Mapping[str, Any]) -> LoggedValues:
    numbers = {str(name): float(value) for name, value in data["values"].items()}
    return LoggedValues(float(data["at"]), int(data["step"]), numbers)


def _document(path: Path, troubles: list[str]) -> Mapping[str, Any] | None:
    try:
        document = read_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        troubles.append(f"{path.name} cannot be read: {error}")
        return None
    return document if isinstance(document, dict) else None


def _lines(
    path: Path,
    read: Callable[[Mapping[str, Any]], _Read],
    troubles: list[str],
    is_kept: Callable[[str], bool] = lambda _line: True,
) -> Iterator[_Read]:
    """Yield what those lines of a file hold that are kept."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            bad = 0
            for line in filter(is_kept, file):
                try:
                    yield read(json.loads(line))
                except NOT_A_RUN:
                    bad += line.endswith("\n")  # else the writer was killed
    except FileNotFoundError:
        return
    except OSError as error:
        troubles.append(f"{path.name} cannot be read: {error.strerror}")
        return
    if bad:
        troubles.append(f"{path.name}: {counted(bad, 'line')} cannot be read")
