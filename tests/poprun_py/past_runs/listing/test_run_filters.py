"""Filters of a list of runs, and the table."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from poprun_py.errors import UsageError
from poprun_py.past_runs.listing.run_filter import RunFilter, parse_age, parse_since
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import RunSummary
from poprun_py.past_runs.listing.run_table import run_lines


def run(name, state=RunState.FINISHED, **fields):
    return RunSummary(name=name, folder=Path("out", name), state=state, **fields)


RUNS = [
    run("lr-1", tags={"lr": "0.1", "data": "a b"}, began_at=200.0),
    run("lr-2", RunState.FAILED, tags={"lr": "0.2"}, began_at=100.0),
    run("other", RunState.RUNNING),
]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (RunFilter(), "lr-1 lr-2 other"),
        (RunFilter(states=frozenset({RunState.FAILED, RunState.RUNNING})), "lr-2 other"),
        (RunFilter(names=("lr-*",)), "lr-1 lr-2"),
        (RunFilter(names=("lr", "*er")), "other"),
        (RunFilter(tags=("lr",)), "lr-1 lr-2"),
        (RunFilter(tags=("lr=0.1",)), "lr-1"),
        (RunFilter(tags=("lr=0.*", "data=a *")), "lr-1"),
        (RunFilter(tags=("lr=",)), ""),
        (RunFilter(since=150.0), "lr-1"),
    ],
)
def test_runs_that_a_filter_accepts(wanted, names):
    assert " ".join(each.name for each in wanted.select(RUNS)) == names


def test_since_is_a_time_before_now_or_a_date():
    assert parse_since("2d", 1e6) == 1e6 - 2 * 86_400
    assert parse_since("2026-01-31", 1e6) == datetime(2026, 1, 31).timestamp()
    assert parse_since("2026-01-31T12:00+00:00", 1e6) == 1_769_860_800
    for text in ("soon", "", "2026-13-01", "-1", "2026-01-31 noon"):
        with pytest.raises(UsageError, match=r"^--since .*or a date such as 2026-01-31$"):
            parse_since(text, 1e6)


@pytest.mark.parametrize("text", ["", "x", "0", "-1d", "nan", "1e999", "30 d"])
def test_ages_that_are_refused(text):
    with pytest.raises(UsageError, match=r"^--remove-older .*: expected a number of seconds"):
        parse_age("--remove-older", text)


def test_a_table_drops_columns_until_it_fits(monkeypatch, golden):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shown = run(
        "lr-1", began_at=1.75e9, ended_at=1.75e9 + 90, step=1200, steps_per_second=4.0,
        loss=float("nan"), exit_code=0, program="train.py", tags={"lr": "0.1"},
    )  # fmt: skip
    odd = run("\x1b[2J", RunState.UNKNOWN, problem="report.json cannot be read (\x1b)")
    lines = run_lines([shown, odd], Path("out"), 2e9, width=200)
    monkeypatch.undo()
    time.tzset()
    golden("run_table.txt", "\n".join(lines) + "\n")
    narrow = run_lines([shown], Path("out"), 2e9, width=30)
    assert narrow[0].split() == ["name", "state", "loss", "code"]
    assert run_lines([run("x" * 50)], Path("out"), 2e9, width=20)[2] == "x" * 19 + "…"
