"""Metrics of several instances, checked from inside the job; run by test_jobs.py.

The argument is a folder for the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import popdist_py

popdist_py.init()
me, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
folder = Path(sys.argv[1])
everyone = range(count)


class Kept:
    def __init__(self):
        self.rows = []

    def write(self, step, values):
        self.rows.append((step, values))

    def close(self):
        pass


def check_reductions():
    reductions = {"samples": "sum", "fastest": "min", "slowest": "max", "lr": "last"}
    metrics = popdist_py.Metrics(reductions=reductions)
    for _ in range(2):
        metrics.update(
            {"train/loss": torch.tensor(float(me))}, weight=me + 1,
            samples=me, fastest=me, slowest=me, lr=10 + me,
        )  # fmt: skip
    found = metrics.compute()
    assert found == {
        "train/loss": sum(i * (i + 1) for i in everyone) / sum(i + 1 for i in everyone),
        "samples": 2 * sum(everyone), "fastest": 0, "slowest": count - 1, "lr": 10,
    }  # fmt: skip


def check_equal_bits():
    metrics = popdist_py.Metrics()
    for n in range(10):
        metrics.update(loss=0.1 * (me + n), weight=0.3 + me)
    found = metrics.compute()["loss"]
    assert popdist_py.all_gather(found) == [found] * count


def check_an_instance_may_lack_names():
    metrics = popdist_py.Metrics()
    if me != 1:  # its shard is empty
        metrics.update(loss=me)
    if me == count - 1:
        metrics.update(only_here=5)
    assert metrics.compute() == {
        "loss": sum(i for i in everyone if i != 1) / (count - 1),
        "only_here": 5,
    }
    assert popdist_py.Metrics().compute() == {}


def check_one_instance_writes():
    kept = Kept()
    metrics = popdist_py.Metrics([kept, popdist_py.CsvSink(folder / "metrics.csv")])
    for step in (5, 10):
        metrics.update(loss=me + step)
        metrics.log(step)
    mean = sum(everyone) / count
    rows = [(5, {"loss": mean + 5}), (10, {"loss": mean + 10})]
    assert kept.rows == (rows if me == 0 else [])


def check_state():
    metrics = popdist_py.Metrics()
    metrics.update(loss=me, weight=2)
    state = metrics.state_dict()
    assert popdist_py.all_gather(state) == [state] * count
    again = popdist_py.Metrics()
    again.load_state_dict(state)
    again.update(loss=7, weight=2)
    assert again.compute()["loss"] == (sum(everyone) + 7 * count) / (2 * count)


def check_groups():
    kept = Kept()

    def validate():
        metrics = popdist_py.Metrics(kept)
        metrics.update(validation=me)
        return metrics.log(3)

    group = set(everyone) - {0}
    found = popdist_py.execute_on_instances(group, validate)
    assert found == ({"validation": sum(group) / len(group)} if me in group else None)
    # The first of the instances that take part writes.
    assert len(kept.rows) == (me == 1)


def check_reductions_differ():
    def compute():
        metrics = popdist_py.Metrics(reductions={"x": "sum"} if me == count - 1 else {})
        metrics.update(x=1)
        with pytest.raises(popdist_py.CollectiveMismatchError) as raised:
            metrics.compute()
        said = (
            f"('mean' on instance {count - 2}, 'sum' on instance {count - 1}): give all instances"
        )
        assert f"the reduction of the metric 'x' differs between instances {said}" in str(
            raised.value
        )

    popdist_py.execute_on_instances({count - 2, count - 1}, compute)


def check_steps_differ():
    kept = Kept()
    metrics = popdist_py.Metrics(kept)
    metrics.update(loss=1)
    with pytest.raises(popdist_py.CollectiveMismatchError, match="'metrics at step 8'"):
        metrics.log(7 + (me == 1))
    assert kept.rows == []
    assert metrics.log(9) == {"loss": 1}  # what was given is kept


checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
for check in checks:
    check()
    popdist_py.barrier()
print(f"{len(checks)} checks")
