"""The soak itself: which cases it draws, that it goes on with its record, and a few cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from support.repository import ROOT

from tools.soak.limits import clock_library, move_clock
from tools.soak.record import Record, last_attempts
from tools.soak.soaks import ALL_ROWS, Soak, draw, possible_rows


def test_titles_tell_rows_apart():
    assert len({row.title for row in ALL_ROWS}) == len(ALL_ROWS)


def test_more_cases_of_a_seed_begin_with_the_same_ones_and_every_row_comes_up():
    rows = ALL_ROWS
    deck = sum(row.weight for row in rows)
    many = draw(rows, 3 * deck, seed=1)
    assert draw(rows, 10, seed=1) == many[:10]
    assert draw(rows, 10, seed=2) != many[:10]
    for row in rows:
        assert many.count(row) == 3 * row.weight


def test_a_record_that_was_cut_off_goes_on(tmp_path):
    path = tmp_path / "record"
    record = Record(path, {"seed": 1})
    record.add({"number": 0, "attempt": 1, "wrong": ["exit code 3"]})
    record.add({"number": 1, "attempt": 1, "wrong": []})
    with path.open("a") as file:
        file.write('{"number": 0, "att')
    again = Record(path, {"seed": 1})
    again.add({"number": 0, "attempt": 2, "wrong": []})
    assert [line["number"] for line in Record(path, {"seed": 1}).lines] == [0, 1, 0]
    assert [(line["number"], line["wrong"]) for line in last_attempts(again.lines)] == [
        (0, []),
        (1, []),
    ]


def test_the_record_of_another_draw_is_left_alone(tmp_path):
    Record(tmp_path / "record", {"seed": 1})
    with pytest.raises(ValueError, match="another draw"):
        Record(tmp_path / "record", {"seed": 2})


def test_a_machine_without_a_lab_leaves_rows_out_and_says_why(monkeypatch):
    monkeypatch.setattr("tools.soak.soaks.missing", lambda: "sshd not installed")
    rows, left_out = possible_rows()
    assert all(row.hosts == 1 for row in rows)
    assert set(left_out) >= {row.title for row in ALL_ROWS if row.hosts > 1}


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_few_cases_and_more_of_the_same_record(tmp_path):
    path = tmp_path / "record"
    words = [sys.executable, "-m", "tools.soak", "--json", path]
    words += ["--rows", "(SIGKILL|SIGSTOP) of a program$"]
    for cases in (1, 2):
        done = subprocess.run(
            [*words, f"--cases={cases}"], capture_output=True, text=True, timeout=250, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["number"] for line in lines[1:]} == {0, 1}
    assert all(line["resumed"] for line in lines[1:])
    assert done.stdout.startswith("2 cases, ")


@pytest.mark.mpi
@pytest.mark.sweep
def test_what_is_not_as_expected_is_wrong(tmp_path):
    row = next(row for row in ALL_ROWS if row.title == "a program ends by itself: exit code 3")
    expected = replace(row.expected, codes=(5,), seconds=0.0001, says="another reason")
    soak = Soak(tmp_path, seed=1)
    wrong = soak.do(0, 1, replace(row, expected=expected))["wrong"]
    soak.close()
    assert wrong[0] == "exit code 3"
    assert wrong[1].startswith("took ")
    assert wrong[2] == "did not say 'another reason'"
    assert len(wrong) == 3


@pytest.mark.sweep
def test_a_clock_is_moved_for_processes_that_ask_for_it_and_durations_stay(tmp_path):
    program = (
        "import time, sys\n"
        "print(time.time(), time.monotonic(), flush=True)\n"
        "sys.stdin.readline()\n"
        "print(time.time(), time.monotonic())\n"
    )
    clock = tmp_path / "clock"
    move_clock(clock, 0)
    began, since = time.time(), time.monotonic()
    env = {**os.environ, "LD_PRELOAD": str(clock_library(tmp_path)), "SOAK_CLOCK": str(clock)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=env,
    ) as process:  # fmt: skip
        before = [float(word) for word in process.stdout.readline().split()]
        move_clock(clock, -3600)
        after = [float(word) for word in process.communicate("\n", timeout=60)[0].split()]
    taken = time.monotonic() - since
    assert before[0] - began <= taken
    assert 0 <= after[1] - before[1] <= taken
    assert -3600 <= after[0] - before[0] <= taken - 3600
