"""Metrics of several instances: equal on all of them, and written by one."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

import popdist_py
from popdist_py.checkpoint import Checkpoints

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("metrics_program.py")


def _number_of_checks(folder):
    with mock.patch.object(sys, "argv", [str(PROGRAM), folder]):
        return len(runpy.run_path(str(PROGRAM))["checks"])


def test_metrics_of_two_instances(instances, tmp_path):
    assert instances.run(_number_of_checks, str(tmp_path)) == [8, 8]
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n5,5.5\n10,10.5\n"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "variables", [{}, {"POPDIST_SHARED_MEMORY": "0"}], ids=["shared memory", "mpi"]
)
def test_metrics_of_three_instances(poprun, warm, tmp_path, variables):
    done = poprun(
        "--num-instances", 3, "--num-replicas", 3, "--oversubscribe",
        *warm, PROGRAM, tmp_path, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("8 checks") == 3
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n5,6.0\n10,11.0\n"


def _train(folder, end):
    """Log means of four steps and save every third step, from the newest checkpoint to ``end``."""
    popdist_py.init()
    me = popdist_py.getInstanceIndex()
    metrics = popdist_py.Metrics(popdist_py.CsvSink(folder / "metrics.csv"))
    files = Checkpoints(folder / "checkpoints")
    newest = popdist_py.broadcast_object(files.latest() if me == 0 else None)
    begin = 0
    if newest is not None:
        begin = newest.step
        metrics.load_state_dict(json.loads(newest.data))
    for step in range(begin + 1, end + 1):
        metrics.update(loss=step + me)
        if step % 4 == 0:
            metrics.log(step)
        if step % 3 == 0:
            state = metrics.state_dict()
            if me == 0:
                files.save(step, json.dumps(state).encode())
            popdist_py.barrier()
    return begin


def test_a_training_that_is_resumed_leaves_the_table_of_one_that_was_not(instances, tmp_path):
    assert instances.run(_train, tmp_path, 8) == [0, 0]
    assert instances.run(_train, tmp_path, 12) == [6, 6]
    # Means over four steps of two instances: the checkpoint of step 6 held two of them.
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n4,3.0\n8,7.0\n12,11.0\n"
