"""The table of a list of runs, as lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from poprun_py.display.formatting import date_text, duration_text, number_text, printable
from poprun_py.display.tables import Column, long_table_lines
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import RunSummary

_NOTHING: Final = "-"
_STYLES: Final = {
    RunState.RUNNING: "cyan",
    RunState.FAILED: "red",
    RunState.LOST: "red",
    RunState.INTERRUPTED: "yellow",
    RunState.UNKNOWN: "yellow",
}


def run_lines(
    runs: Sequence[RunSummary], parent: Path, now: float, *, width: int, colour: bool = False
) -> list[str]:
    """Return text lines with a row for each run.

    If the table is wider than ``width`` characters, some of its columns are left out.

    Args:
        runs: The runs, in the order of the rows.
        parent: The folder of the runs, as the user gave it.
        now: The current time in seconds since the epoch, for the durations of running runs.
        width: The width of the terminal, in characters.
        colour: Whether the rows of runs that did not finish are coloured.
    """

    def column(
        title: str, cell: Callable[[RunSummary], str], drop_order: int = 0, *, is_text: bool = False
    ) -> Column:
        return Column(title, tuple(map(cell, runs)), drop_order=drop_order, is_text=is_text)

    columns = [
        column("name", lambda run: printable(run.name), is_text=True),
        column("state", lambda run: str(run.state), is_text=True),
        column("began", _began, 7, is_text=True),
        column("took", lambda run: _duration(run.seconds(now)), 6),
        column("step", lambda run: _NOTHING if run.step is None else f"{run.step:,}", 3),
        column("steps/s", lambda run: _number(run.steps_per_second), 5),
        column("loss", lambda run: _number(run.loss), 8),
        column("code", lambda run: _NOTHING if run.exit_code is None else str(run.exit_code), 9),
        column("tags", _tags, 4, is_text=True),
        column("program", lambda run: run.program or _NOTHING, 2, is_text=True),
        column("folder", lambda run: printable(str(parent / run.name)), 1, is_text=True),
    ]
    if not any(run.tags for run in runs):
        columns = [each for each in columns if each.title != "tags"]
    styles = [_STYLES.get(run.state) for run in runs]
    table = long_table_lines(columns, width=max(width, 20), row_styles=styles, colour=colour)
    problems = [f"note: {printable(run.name)}: {run.problem}" for run in runs if run.problem]
    return [*table, *map(printable, problems)]


def _began(run: RunSummary) -> str:
    if run.began_at is None:
        return _NOTHING
    try:
        return date_text(run.began_at).rpartition(":")[0]
    except (ValueError, OverflowError, OSError):
        return _NOTHING


def _duration(seconds: float | None) -> str:
    return _NOTHING if seconds is None else duration_text(seconds)


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return number_text(value) if math.isfinite(value) else str(value)


def _tags(run: RunSummary) -> str:
    return printable(", ".join(f"{key}={value}" for key, value in run.tags.items())) or _NOTHING
