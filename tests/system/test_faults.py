"""Every row of the fault table, through the real mpirun."""

from __future__ import annotations

from datetime import datetime

import pytest
from support.faults import FAULTS, Fault, fail_at, measure, measure_calmly

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]
# Rows that show much of what others do.
AGAIN = {
    "exception in instance 0",
    "abort",
    "plain programs, one ends with 3",
    "failure in a data-loader worker",
    "memory is refused",
    "an instance with child processes ends with 3",
    "hidden instance fails",
    "SIGHUP: the terminal is gone",
    "pre-empted: SIGUSR1",
    "SIGKILL of the shell that waits for the launcher",
}
assert {fault.title for fault in FAULTS} > AGAIN


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.title, marks=pytest.mark.sweep if fault.title in AGAIN else ())
        for fault in FAULTS
    ],
)
def test_fault(fault, tmp_path):
    seen, wrong = measure_calmly(fault, tmp_path)
    assert not wrong, f"{seen.stdout}\n{seen.stderr}"


def test_report_tells_what_happened(tmp_path):
    fault = Fault(title="", code=1, env=fail_at(1, 5, "exception"))
    report = measure(fault, tmp_path / "out").report
    first = report["first_failure"]
    assert report["exit_code"] == 1
    assert (first["index"], first["exit_code"], first["training_step"]) == (1, 1, 4)
    assert first["name"] == "instance 1 (replica 1)"
    assert first["pid"] > 1
    assert first["host"]
    assert datetime.fromisoformat(first["ended_at"]).tzinfo
    assert first["traceback"].startswith("Traceback (most recent call last):")
    assert first["traceback"].endswith("ValueError: the loss is not a number")
    assert first["stderr"][-1] == "ValueError: the loss is not a number"
    assert report["collateral"] == [0]
    assert report["instances"][0]["was_stopped"]


def test_job_is_started_again_after_a_failure(tmp_path):
    env = {**fail_at(1, 5, "kill"), "STEPS": "20"}
    fault = Fault(title="", code=0, env=env, options=("--max-restarts", "2"), seconds=20)
    seen = measure(fault, tmp_path / "out")
    assert seen.code == 0
    assert seen.report["restart_count"] == 1
    assert "restart 1 of 2 in 1 s" in seen.stderr
    assert "failed first: signal SIGKILL" in seen.stderr


def test_last_failure_counts_when_restarts_are_used_up(tmp_path):
    env = {**fail_at(1, 2, "exit"), "PLAIN": "1", "EVERY_RUN": "1"}
    fault = Fault(title="", code=3, env=env, options=("--max-restarts", "1"), seconds=20)
    seen = measure(fault, tmp_path / "out")
    assert (seen.code, seen.report["restart_count"]) == (3, 1)


def test_all_instances_stop_at_the_same_step(tmp_path):
    import signal

    fault = Fault(title="", code=75, env={"POLITE": "1"}, send=(signal.SIGTERM, signal.SIGUSR1))
    seen = measure(fault, tmp_path / "out")
    stops = {line.partition(">:")[2] for line in seen.stdout.splitlines() if "stopped" in line}
    assert seen.code == 75
    assert len(stops) == 1, seen.stdout


COMPILES = """
import time
from popdist_py import heartbeat
from popdist_py.environment import COMPILING, INFERENCE
for _ in range(5):
    heartbeat.step()
    time.sleep(0.1)
heartbeat.enter(COMPILING)
time.sleep(3)
heartbeat.enter(INFERENCE)
{}
heartbeat.call()
"""


@pytest.mark.sweep
def test_compiling_between_steps_is_no_hang_and_a_silent_call_is_one(poprun, script):
    done = poprun("--hang-timeout", "1", script(COMPILES.format("")))
    assert done.returncode == 0, done.stderr
    done = poprun("--hang-timeout", "1", script(COMPILES.format("time.sleep(60)")))
    assert done.returncode == 124
    assert "hangs: no step for " in done.stderr
    assert ", in inference call 1 after training step 5\n" in done.stderr


SLOW = """
import atexit, os, time
import numpy as np
import popdist_py
from popdist_py import heartbeat
from popdist_py.checkpoint import Checkpoints

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))

def slow(descriptor):
    time.sleep(0.6)
    sync(descriptor)

popdist_py.init()
first = popdist_py.getInstanceIndex() == 0
for _ in range(5):
    popdist_py.all_reduce(np.ones(3))
    heartbeat.step()
if first:
    sync, os.fsync = os.fsync, slow
    Checkpoints("checkpoints").save(5, b"x")
    compute(0.8)
popdist_py.barrier()
atexit.register(time.sleep, 0.8)
"""


def test_saving_evaluating_and_ending_between_short_steps_are_no_hangs(poprun, script):
    """Each takes longer than the limit; the other instance waits meanwhile."""
    done = poprun("--num-instances", 2, "--num-replicas", 2, "--hang-timeout", 0.5, script(SLOW))
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep
def test_a_stopped_mpirun_is_named_and_ends_with_the_job(tmp_path):
    env = {**fail_at(1, 5, "stop_mpirun"), "STEPS": "20"}
    fault = Fault(title="", code=124, env=env, options=("--hang-timeout", "1.5"), seconds=5,
                  says="no step for .* while mpirun .* is stopped")  # fmt: skip
    _, wrong = measure_calmly(fault, tmp_path)
    assert not wrong
