"""examples/sweep.py: every trial has its row, however its job ended."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

SWEEP = ROOT / "examples" / "sweep.py"
TRIAL = """
import os, pathlib, sys, time
rate = float(sys.argv[sys.argv.index("--learning-rate") + 1])
print("epochs", sys.argv[sys.argv.index("--epochs") + 1], "CPUs", os.sched_getaffinity(0))
if rate > 1:
    raise ValueError("the loss is nan")
if rate == 0.5:
    pathlib.Path("began").touch()
    time.sleep(600)
if rate == 0.25:
    os.kill(os.getpid(), 9)
print(f"test accuracy {100 * rate:.1f} %")
"""
# A job that has ended gives its CPUs back. So each of the two jobs waits until the other has begun.
MEETING_TRIAL = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("--learning-rate") + 1] + ".began").touch()
until = time.monotonic() + 60
while len(list(pathlib.Path().glob("*.began"))) < 2 and time.monotonic() < until:
    time.sleep(0.01)
print("CPUs", os.sched_getaffinity(0))
print("test accuracy 10.0 %")
"""

pytestmark = [pytest.mark.examples, pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.fixture
def start(script, tmp_path):
    """Start a sweep of a program that needs no training; afterwards nothing of it is left."""
    name, value = "SWEEP_TEST_MARK", f"sweep-{os.getpid()}-{time.monotonic_ns()}"

    def call(*words, program=None):
        return subprocess.Popen(
            [sys.executable, SWEEP, "--program", program or script(TRIAL), *map(str, words)],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    yield call
    wait_until(lambda: not survivors(f"{name}={value}"), 30, "processes of the sweep are left")


def test_every_way_to_end_has_a_row(start, tmp_path):
    sweep = start("--learning-rates", 0.1, 2, 0.25, 0.5, 0.3, "--timeout", 15, "--epochs", 7)
    stdout, stderr = sweep.communicate(timeout=100)
    assert sweep.returncode == 1, stderr
    assert stderr == ""
    lines = stdout.splitlines()
    assert lines[0].split() == ["learning", "rate", "accuracy", "seconds", "exit", "code"]
    assert lines[-1] == "best: learning rate 0.3 with 30.0 %"
    rows = {row.split()[0]: row for row in lines[1:-1]}
    assert re.search(r"10\.0 % +[\d.]+ +0$", rows["0.1"])
    assert re.search(r" - +[\d.]+ +1  instance [01]: ValueError: the loss is nan$", rows["2"])
    assert re.search(r" - +[\d.]+ +137  instance [01]: ", rows["0.25"])
    assert re.search(r" - +[\d.]+ +124  the time limit of 15 s is over", rows["0.5"])
    with (tmp_path / "sweep" / "trials.csv").open(newline="") as file:
        written = {row["learning_rate"]: row for row in csv.DictReader(file)}
    assert {rate: row["exit_code"] for rate, row in written.items()} == {
        "0.1": "0", "2.0": "1", "0.25": "137", "0.5": "124", "0.3": "0",
    }  # fmt: skip
    assert written["0.3"]["accuracy"] == "30.0"
    assert written["2.0"]["accuracy"] == ""
    log = (tmp_path / "sweep" / "learning-rate-2.log").read_text()
    assert "epochs 7" in log
    assert "Traceback" in log


def test_jobs_side_by_side_have_cpus_of_their_own(start, script, tmp_path):
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one CPU has no room for two jobs")
    sweep = start(
        *("--learning-rates", 0.1, 0.2, "--num-instances", 1, "--num-replicas", 1),
        program=script(MEETING_TRIAL),
    )
    assert sweep.communicate(timeout=100)[1] == ""
    assert sweep.returncode == 0
    used = [
        set(map(int, re.search(r"CPUs \{(.*)\}", log.read_text())[1].split(",")))
        for log in (tmp_path / "sweep").glob("*.log")
    ]
    assert len(used) == 2
    assert not used[0] & used[1]
    assert used[0] | used[1] <= cpus


def test_ctrl_c_ends_the_job_and_the_sweep(start, tmp_path):
    sweep = start("--learning-rates", 0.5, 0.1)
    wait_until((tmp_path / "began").exists, 30)
    os.killpg(sweep.pid, signal.SIGINT)
    _, stderr = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert stderr == ""
    assert not (tmp_path / "sweep" / "learning-rate-0.1.log").exists()
