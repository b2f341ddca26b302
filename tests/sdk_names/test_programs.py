"""Whole programs under the SDK's names: import orders, worker processes, a job of two instances."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sdk_names.places import NAMES, forgotten
from support.repository import ROOT

HERE = Path(__file__).parent
WITHOUT = () if importlib.util.find_spec("torchvision") else ("import torchvision",)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "words",
    [
        ("23", "warm"),
        pytest.param(("7", "warm"), marks=pytest.mark.long),
        pytest.param(("all", "cold"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
@pytest.mark.timeout(300)
def test_the_order_of_imports_does_not_matter(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py", HERE / "orders_program.py", *words, *WITHOUT],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    counted, *failed = done.stdout.splitlines()
    assert not failed, done.stderr[-3000:]
    assert int(counted) >= 8


@pytest.mark.sweep
def test_worker_processes_have_the_names(python):
    methods = ("fork", "forkserver", "spawn")
    done = python(HERE / "workers_program.py", *methods)
    assert done.returncode == 0, done.stderr
    pools = [f"{method} pool" for method in methods]
    assert done.stdout.splitlines() == [*pools, *["loader 56.0"] * 3]


TRAINING = """
import popdist
import popdist.poptorch
import horovod.torch as hvd
import poptorch
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, y):
        out = self.layer(x)
        return out, poptorch.identity_loss((out - y) ** 2, reduction="mean")


if __name__ == "__main__":
    if popdist.isPopdistEnvSet():
        popdist.init()
        hvd.init()
        options = popdist.poptorch.Options()
        assert (hvd.size(), hvd.rank()) == (popdist.getNumInstances(), popdist.getInstanceIndex())
        replicas = popdist.getNumTotalReplicas()
    else:
        replicas = 4
        options = poptorch.Options().replicationFactor(replicas)
    options.showCompilationProgressBar(False)
    model = Model()
    torch.nn.init.constant_(model.layer.weight, 0.5)
    torch.nn.init.constant_(model.layer.bias, 0.0)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).view(16, 2) / 16, torch.ones(16, 1))
    # All samples in every step: how they are shared out makes no difference.
    loader = poptorch.DataLoader(options, data, batch_size=16 // replicas)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    for _ in range(3):
        for x, y in loader:
            training(x, y)
    total = model.layer.weight.detach().sum().double()
    if popdist.isPopdistEnvSet():
        total = hvd.allreduce(total)
    if popdist.getInstanceIndex() == 0:
        print(len(loader), f"steps, {total:.6f}")
"""


TRAINED = "1 steps, 0.776101\n"


def _printed_by_training() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, forgotten():
        exec(TRAINING, {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.mpi
def test_a_program_of_the_sdk_runs_on_two_instances(instances):
    assert instances.run(_printed_by_training) == [TRAINED, ""]


@pytest.mark.mpi
@pytest.mark.sweep
def test_a_program_of_the_sdk_is_started_by_the_launcher(poprun, script):
    done = poprun("-n", 2, "--num-replicas", 4, "--output", "plain", script(TRAINING))
    assert (done.returncode, done.stdout) == (0, TRAINED), done.stderr


@pytest.mark.sweep
def test_the_same_program_runs_alone(python, script):
    done = python(script(TRAINING))
    assert (done.returncode, done.stdout) == (0, TRAINED), done.stderr


TYPED = """\
import horovod.torch as hvd
import popart
import popdist
import popdist.poptorch
import poptorch
import poptorch.optim
import torch
from poptorch.enums import OutputMode

options: poptorch.Options = popdist.poptorch.Options(ipus_per_replica=2)
options.deviceIterations(4).outputMode(OutputMode.All)
model = torch.nn.Linear(2, 1)
optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
training = poptorch.trainingModel(model, options, optimizer=optimizer)
index: int = popdist.getInstanceIndex()
size: int = hvd.size()
kind: int = popart.SyntheticDataMode.Zeros
reveal_type(poptorch.optim.AdamW)
"""
WRONG = """
poptorch.Optionz()
options.deviceIterations("four")
popdist.getInstanceIndexx()
"""


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_a_program_is_typed(tmp_path, script):
    mypy = importlib.util.find_spec("mypy")
    assert mypy
    program = script(TYPED + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}/cache", program],
        env={**os.environ, "MYPYPATH": f"{NAMES}:{ROOT}"}, cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    first = len(TYPED.splitlines()) + 1
    lines = [line.partition("program.py:")[2] for line in done.stdout.splitlines()]
    assert "optim.AdamW" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:4]] == [str(first + i) for i in (1, 2, 3)]
    assert "has no attribute" in lines[1]
    assert "3 errors" in done.stdout
