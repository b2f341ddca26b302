"""Summaries of runs for a list, read from their reports and from the ends of their files."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from poprun_py.display.formatting import iso_time, printable
from poprun_py.errors import UsageError, shortened
from poprun_py.past_runs.listing.run_state import (
    RunState,
    ended_state,
    is_locked,
    read_liveness,
    unended_state,
)
from poprun_py.past_runs.recorded_run import DAMAGE_ERRORS, seconds_since_epoch
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.user_program import short_name

_MOST_REPORT_BYTES: Final = 256 << 20
# The most bytes to read at the end of a file. An observation of 4,096 instances takes 3 MiB.
_MOST_END_BYTES: Final = 8 << 20
_FIRST_END_BYTES: Final = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run in a list of runs; unknown values are None.

    Attributes:
        name: The name of the run's folder.
        folder: The path of the run's folder.
        began_at: The start of the run, in seconds since the epoch.
        ended_at: The end of the run; for a lost run, the last change of its files.
        exit_code: The exit code of the run; None if the run has no recorded end.
        cause: The cause of the end of the last attempt, as in the report.
        program: The name of the program.
        step: The last training step of an instance.
        steps_per_second: The training steps per second of the slowest instance.
        loss: The last loss, averaged over the instances.
        tags: The tags of the run.
        note: The note of the run.
        report_ns: The time of the last change of report.json, in nanoseconds since the epoch.
        problem: The reason why the report of the run cannot be read; empty if it can.
    """

    name: str
    folder: Path
    state: RunState
    began_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: str = ""
    program: str = ""
    instances: int | None = None
    step: int | None = None
    steps_per_second: float | None = None
    loss: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    report_ns: int = 0
    problem: str = ""

    def seconds(self, now: float) -> float | None:
        """Return the duration of the run; of a running run, until ``now``."""
        end = now if self.state is RunState.RUNNING else self.ended_at
        if self.began_at is None or end is None:
            return None
        return max(0.0, end - self.began_at)

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the summary as JSON values."""
        loss, seconds = self.loss, self.seconds(now)
        return {
            "name": self.name,
            "state": str(self.state),
            "folder": str(self.folder.absolute()),
            "program": self.program,
            "began_at": _iso_time(self.began_at),
            "ended_at": _iso_time(self.ended_at),
            "seconds": None if seconds is None else round(seconds, 3),
            "exit_code": self.exit_code,
            "cause": self.cause or None,
            "num_instances": self.instances,
            "step": self.step,
            "steps_per_second": self.steps_per_second,
            "loss": loss if loss is None or math.isfinite(loss) else str(loss),
            "tags": dict(self.tags),
            "note": self.note or None,
            "problem": self.problem or None,
        }


def _iso_time(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else iso_time(seconds)
    except (ValueError, OverflowError, OSError):
        return None  # a damaged report has a time that no calendar has


def read_summaries(parent: Path) -> list[RunSummary]:
    """Return the runs in a folder, the newest first.

    Links, such as ``latest``, and folders without the files of a run are left out.

    Raises:
        UsageError: The folder cannot be read.
    """
    try:
        with os.scandir(parent) as entries:
            folders = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise UsageError(
            f"{parent}: {error.strerror}; expected the folder of the runs (--output-dir)"
        ) from None
    found = [each for each in map(read_summary, folders) if each is not None]
    return sorted(found, key=lambda run: (run.began_at or 0.0, run.name), reverse=True)


def read_summary(folder: Path) -> RunSummary | None:
    """Return the summary of the run in ``folder``; None if the folder is not a run's folder."""
    files = RunFiles(folder)
    try:
        changed_ns = files.report.lstat().st_mtime_ns
        report = _read_report(files.report)
        return None if report is None else _summary(folder, report, changed_ns)
    except FileNotFoundError:
        # Until a run has IPUs, its folder is empty and locked.
        if not is_locked(folder):
            return None
        return RunSummary(
            name=folder.name, folder=folder, state=RunState.RUNNING, began_at=_changed_at(folder)
        )
    except (OSError, *DAMAGE_ERRORS) as error:
        if not _has_attempts(files):
            return None
        problem = f"report.json cannot be read ({_reason(error)})"
        return RunSummary(
            name=folder.name,
            folder=folder,
            state=RunState.UNKNOWN,
            began_at=_changed_at(folder),
            problem=problem,
        )


def unreadable_folders(parent: Path) -> int:
    """Return the number of folders in ``parent`` whose files this user may not read."""
    try:
        with os.scandir(parent) as entries:
            folders = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return 0
    return sum(not os.access(each, os.R_OK | os.X_OK) for each in folders)


def _reason(error: Exception) -> str:
    """Return why a report cannot be read, for people."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    return shortened(f"damaged: {error!r}")


def _has_attempts(files: RunFiles) -> bool:
    try:
        return bool(files.attempts())
    except OSError:
        return False


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read_report(path: Path) -> dict[str, Any] | None:
    """Return the content of report.json; None if another program has written the file."""
    # A named pipe must not block the list.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_REPORT_BYTES:
            return None
        report = json.loads(file.read())
    is_ours = isinstance(report, dict) and {"run_id", "state", "attempts", "plan"} <= report.keys()
    return report if is_ours else None


def _summary(folder: Path, report: Mapping[str, Any], report_ns: int) -> RunSummary:
    attempts = [each for each in report["attempts"] if isinstance(each, dict)]
    last = attempts[-1] if attempts else {}
    began = seconds_since_epoch(report.get("began_at"))
    ended = seconds_since_epoch(report.get("ended_at"))
    if report["state"] == "ended":
        state = ended_state(report)
    else:
        last_began = seconds_since_epoch(last.get("began_at")) or began or 0.0
        written_at = _last_written(folder, last)
        facts = read_liveness(folder, report.get("launcher"), time.time() - last_began, written_at)
        state = unended_state(facts)
        ended = None if state is RunState.RUNNING else written_at
    words = tuple(map(str, report.get("program") or ()))
    tags = report.get("tags")
    return RunSummary(
        name=folder.name,
        folder=folder,
        state=state,
        began_at=began,
        ended_at=ended,
        exit_code=_whole(report.get("exit_code")),
        cause=str(last.get("cause") or ""),
        program=printable(short_name(words)) if words else "",
        instances=_whole(report["plan"].get("num_instances")),
        tags={str(k): str(v) for k, v in tags.items()} if isinstance(tags, dict) else {},
        note=str(report.get("note") or ""),
        report_ns=report_ns,
        **_measured_or_unknown(folder, attempts),
    )


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _last_written(folder: Path, attempt: Mapping[str, Any]) -> float:
    own = folder / str(attempt.get("folder", ""))
    paths = (folder / "report.json", own / "looks.jsonl", own / "steps.jsonl")
    return max((at for path in paths if (at := _changed_at(path)) is not None), default=0.0)


# --- progress of a run --------------------------------------------------------------------------


def _measured_or_unknown(folder: Path, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    try:
        return _measured(folder, attempts)
    except DAMAGE_ERRORS:
        return {}  # another version of the launcher may have written the observation


def _measured(folder: Path, attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return step, speed and loss of the last attempt that an observation of the job describes."""
    for attempt in reversed(attempts):
        own = folder / f"attempt-{attempt.get('number')}"
        view = attempt.get("observation") or _last_line(own / "looks.jsonl")
        states = view.get("instances") if isinstance(view, dict) else None
        if not isinstance(states, list):
            continue
        steps = [s["step"] for s in states if type(s.get("step")) is int]
        timed = [s["step_seconds"]["median"] for s in states if s.get("num_timed_steps")]
        losses = [float(s["loss"]) for s in states if s.get("loss") is not None]
        if not losses:
            values = (_last_line(own / "instance-0.values.jsonl") or {}).get("values", {})
            losses = [float(values["loss"])] if "loss" in values else []
        if steps or timed or losses:
            speed = 1 / max(timed) if timed else None
            return {
                "step": max(steps, default=None),
                "steps_per_second": speed if speed is not None and math.isfinite(speed) else None,
                "loss": sum(losses) / len(losses) if losses else None,
            }
    return {}


def _last_line(path: Path) -> Any:
    """Return the JSON value in the last whole line of a file; None without one."""
    for line in _last_lines(path):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            continue
    return None


def _last_lines(path: Path) -> Iterator[bytes]:
    """Yield the last lines of a file, read from longer and longer ends of the file."""
    try:
        with open(path, "rb", opener=lambda n, flags: os.open(n, flags | os.O_NONBLOCK)) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                return
            length = _FIRST_END_BYTES
            while True:
                file.seek(max(0, state.st_size - length))
                lines = file.read(length).split(b"\n")
                # The first piece may lack its beginning, and the last one its end.
                whole = lines[1:-1] if length < state.st_size else lines[:-1]
                if whole or length >= min(state.st_size, _MOST_END_BYTES):
                    yield from reversed(whole[-2:])
                    return
                length *= 8
    except OSError:
        return
