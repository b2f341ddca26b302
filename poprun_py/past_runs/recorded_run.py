"""Reader of the report, the recorded steps, the observations and the logged values of a run.

If a line of a file cannot be parsed, the line is skipped and counted in ``RecordedRun.problems``.
An incomplete last line of a file is not counted, because a killed launcher may leave such a line.
If a run is very long, only evenly spaced steps and observations are kept to save memory.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from popdist_py.errors import counted
from poprun_py.display.formatting import read_json
from poprun_py.errors import UsageError
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.running.output_files import output_parts
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.records import StepRecord

# Errors that occur in computations with the values of a damaged or edited report.
DAMAGE_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_Read = TypeVar("_Read")
# The limits of what is read from one attempt into memory: the largest number of steps, the largest
# number of instance states in all observations, and the number of observations always kept.
_MOST_STEPS: Final = 100_000
_MOST_STATES, _LEAST_OBSERVATIONS = 20_000, 100
_INSTANCE: Final = re.compile(r"instance-(\d+)\.")
_STEP: Final = re.compile(r'"step": ?(\d+)')


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """Values that a program logged at one step; ``at`` is the time in seconds since the epoch."""

    at: float
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAttempt:
    """One attempt of a recorded run; the first attempt has number 1.

    Attributes:
        report: The part of report.json about this attempt.
        plan: The content of plan.json; None if the file is missing.
        steps: The recorded training steps of all instances, sorted by time.
        observations: The views of the job, each with its time in seconds since the epoch.
        values: The values that the program logged, sorted by time.
        devices: The content of each instance's file about emulated IPUs, keyed by the instance.
        outputs: The names of each instance's output files that are not empty.
    """

    number: int
    report: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    steps: tuple[StepRecord, ...] = ()
    observations: tuple[tuple[float, JobView], ...] = ()
    values: tuple[LoggedValues, ...] = ()
    devices: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    outputs: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def steps_by_instance(self) -> dict[int, list[StepRecord]]:
        """Return the recorded steps of each instance, in order."""
        found: defaultdict[int, list[StepRecord]] = defaultdict(list)
        for each in self.steps:
            found[each.instance].append(each)
        return found

    def last_view(self) -> JobView | None:
        """Return the attempt's last job view, preferably from the report; None without any view."""
        observation = self.report.get("observation")
        if isinstance(observation, dict):
            try:
                return JobView.from_json(observation)
            except DAMAGE_ERRORS:
                pass  # another version of the launcher may have written the report
        return self.observations[-1][1] if self.observations else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as read from its files; ``problems`` describes the parts that could not be read."""

    files: RunFiles
    report: Mapping[str, Any]
    attempts: tuple[RecordedAttempt, ...]
    problems: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """The name of the run, which is the name of its folder."""
        return str(self.report["run_id"])

    @property
    def is_running(self) -> bool:
        """Whether the run has not ended, or its launcher was killed."""
        return self.report.get("state") == "running"

    @property
    def began_at(self) -> float | None:
        """The start of the run in seconds since the epoch; None if the report lacks the start."""
        return seconds_since_epoch(self.report.get("began_at"))


def read_run(files: RunFiles) -> RecordedRun:
    """Read a run, which may not have ended yet.

    Raises:
        UsageError: The report of the run cannot be read.
    """
    problems: list[str] = []
    with refusing_damage(files):
        try:
            report = read_json(files.report.read_bytes())
        except OSError as error:
            why = error.strerror
            raise UsageError(f"{files.report} is not a report of a run ({why})") from None
        reports = {each["number"]: each for each in report["attempts"]}
        report["run_id"], report["plan"]["num_instances"]
    attempts = tuple(
        _read_attempt(number, folder, reports.get(number, {}), problems)
        for number, folder in files.attempts().items()
    )
    return RecordedRun(files=files, report=report, attempts=attempts, problems=tuple(problems))


@contextmanager
def refusing_damage(files: RunFiles) -> Iterator[None]:
    """Raise UsageError if code in the ``with`` block fails on a bad value of a run's report."""
    try:
        yield
    except DAMAGE_ERRORS as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise UsageError(
            f"{files.report} is not a report of a run ({why:.200}). Was the file edited?"
        ) from None


def seconds_since_epoch(text: object) -> float | None:
    """Return an ISO time as seconds since the epoch; None if ``text`` is not an ISO time."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _read_attempt(
    number: int, folder: Path, report: Mapping[str, Any], problems: list[str]
) -> RecordedAttempt:
    def of_instances(kind: str) -> list[tuple[int, Path]]:
        paths = sorted(folder.glob(f"instance-*.{kind}"))
        return [(int(match[1]), path) for path in paths if (match := _INSTANCE.match(path.name))]

    steps = _steps(folder / "steps.jsonl", problems)
    values = [
        each
        for _, path in of_instances("values.jsonl")
        for each in _lines(path, _logged_values, problems)
    ]
    outputs: defaultdict[int, list[str]] = defaultdict(list)
    for instance, newest in (*of_instances("stdout"), *of_instances("stderr")):
        for path in output_parts(newest):
            if path.is_file() and path.stat().st_size:
                outputs[instance].append(path.name)
    return RecordedAttempt(
        number=number,
        report=report,
        plan=_document(folder / "plan.json", problems),
        steps=tuple(sorted(steps, key=lambda each: (each.at, each.instance))),
        observations=tuple(_observations(folder / "looks.jsonl", problems)),
        values=tuple(sorted(values, key=lambda each: each.at)),
        devices={
            instance: document
            for instance, path in of_instances("device.json")
            if (document := _document(path, problems)) is not None
        },
        outputs=outputs,
    )


def _steps(path: Path, problems: list[str]) -> list[StepRecord]:
    """Return the steps of an attempt; if all steps would take too much memory, every n-th one."""
    kept: list[StepRecord] = []
    every, most = 1, _MOST_STEPS

    def is_kept(line: str) -> bool:
        number = _STEP.search(line) if every > 1 else None
        return number is None or int(number[1]) % every == 0

    for record in _lines(path, StepRecord.from_json, problems, is_kept):
        kept.append(record)
        if len(kept) > most:
            every *= 2
            kept = [each for each in kept if each.step % every == 0]
            # If all steps in a damaged file have the same number, many steps remain. The limit is
            # then raised, because removing steps again would not help.
            most = max(_MOST_STEPS, 2 * len(kept))
    return [each if each.every >= every else replace(each, every=every) for each in kept]


def _observations(path: Path, problems: list[str]) -> list[tuple[float, JobView]]:
    kept: list[tuple[float, JobView]] = []
    every, numbers = 1, count()
    read_lines = _lines(path, _observation, problems, lambda _line: next(numbers) % every == 0)
    for each in read_lines:
        kept.append(each)
        if len(kept) > max(_MOST_STATES // (len(each[1].instances) or 1), _LEAST_OBSERVATIONS):
            every *= 2
            kept = kept[::2]
    return kept


def _observation(data: Mapping[str, Any]) -> tuple[float, JobView]:
    return float(data["at"]), JobView.from_json(data)


def _logged_values(data: Mapping[str, Any]) -> LoggedValues:
    numbers = {str(name): float(value) for name, value in data["values"].items()}
    return LoggedValues(float(data["at"]), int(data["step"]), numbers)


def _document(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    try:
        document = read_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    return document if isinstance(document, dict) else None


def _lines(
    path: Path,
    read: Callable[[Mapping[str, Any]], _Read],
    problems: list[str],
    is_kept: Callable[[str], bool] = lambda _line: True,
) -> Iterator[_Read]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            bad = 0
            for line in filter(is_kept, file):
                try:
                    yield read(json.loads(line))
                except DAMAGE_ERRORS:
                    bad += line.endswith("\n")  # do not count an incomplete last line of the file
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return
    if bad:
        problems.append(f"{path.name}: {counted(bad, 'line')} cannot be read")
