"""Faults in real jobs, whose exit codes, reports and processes are checked."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import datetime

import pytest

from tools.soak.faults import FAULTS, Fault, fail_at, measure, problems

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]
ROWS = {fault.title: fault for fault in FAULTS}
# Rows that show much of what others do, or that another test shows.
AGAIN = {
    "exception",
    "exception in instance 0",
    "abort",
    "plain programs, one ends with 3",
    "failure in a data-loader worker",
    "memory is refused",
    "an instance with child processes ends with 3",
    "hidden instance fails",
    "Ctrl-C",
    "SIGTERM",
    "SIGHUP: the terminal is gone",
    "pre-empted: SIGTERM, programs ask stopRequested()",
    "pre-empted: SIGUSR1",
    "SIGKILL of the shell that waits for the launcher",
}
# Rows that do not need MPI to show how the launcher and the wrappers act; the long tests have it.
PLAIN = {
    "segmentation fault",
    "the other ignores SIGTERM (--grace 1)",
    "time limit (--timeout 5)",
    "hang in C with the interpreter's lock",
    "a stopped instance (SIGSTOP)",
    "Ctrl-C twice, the programs ignore SIGTERM",
    "hang in Python",
    "SIGKILL of an instance",
    "SIGKILL of the launcher",
    "SIGKILL of mpirun",
    "SIGTERM of mpirun",
    "SIGKILL of the wrapper of an instance",
}
assert set(ROWS) > AGAIN | PLAIN


def plain(fault: Fault) -> Fault:
    return replace(fault, env={**fault.env, "PLAIN": "1"})


@pytest.mark.parametrize(
    "fault",
    [
        *(
            pytest.param(plain(fault) if title in PLAIN else fault, id=title)
            for title, fault in ROWS.items()
            if title not in AGAIN
        ),
        *(pytest.param(ROWS[title], id=title, marks=pytest.mark.sweep) for title in sorted(AGAIN)),
        *(
            pytest.param(ROWS[title], id=f"{title}, MPI", marks=pytest.mark.long)
            for title in sorted(PLAIN)
        ),
    ],
)
def test_fault(fault, tmp_path):
    seen = measure(fault, tmp_path)
    assert not problems(fault, seen), f"{seen.stdout}\n{seen.stderr}"


def test_report_tells_what_happened(tmp_path):
    seen = measure(ROWS["exception"], tmp_path)
    assert not problems(ROWS["exception"], seen), seen.stderr
    assert seen.stderr.count("Traceback") == 1
    assert seen.stderr.count("[1,1]<stderr>:ValueError: the loss is not a number") == 1
    report = seen.report
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


def test_all_instances_stop_at_the_same_step_also_when_they_are_asked_twice(tmp_path):
    row = ROWS["pre-empted: SIGTERM, programs ask stopRequested()"]
    fault = replace(row, send=(signal.SIGTERM, signal.SIGUSR1))
    seen = measure(fault, tmp_path)
    assert not problems(fault, seen), seen.stderr
    stops = [line.partition(">:")[2] for line in seen.stdout.splitlines() if "stopped" in line]
    assert len(stops) == 2
    assert stops[0] == stops[1]


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
    assert "hangs: no training step for " in done.stderr
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
    fault = Fault(title="", code=124, env=env, options=("--hang-timeout", "1.5"),
                  says="no training step for .* while mpirun .* is stopped")  # fmt: skip
    seen = measure(fault, tmp_path)
    assert not problems(fault, seen), seen.stderr
