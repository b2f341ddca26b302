"""Instances that differ, or end in the middle of a step, end the job."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.sweep, pytest.mark.timeout(100)]
PROGRAM = """
import os, sys, torch
from torch import nn
import popdist_py
from popdist_py import poptorch

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.calls = []
    def forward(self, x):
        self.calls.append(None)
        x = self.first(x)
        if WHAT == "dies" and ME == 1 and len(self.calls) == 3:
            os._exit(7)
        if WHAT == "skips" and ME == 1 and len(self.calls) == 3:
            return poptorch.identity_loss(x, "mean")
        return poptorch.identity_loss(self.second(x), "mean")

popdist_py.init()
WHAT, ME = sys.argv[1], popdist_py.getInstanceIndex()
options = poptorch.DistributedOptions()
options.Emulator.replicaExecution("loop")
options.Training.distributedBatchNormReplicaGroupSize(1 if WHAT == "size" and ME else 2)
model = Model()
wrapped = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    wrapped(torch.randn(3, 4))
print("trained")
"""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("dies", "instance 1 (replica 1) on"),
        ("skips", "batch norm of 4 channels (forward)"),
        ("size", "distributedBatchNormReplicaGroupSize(1)"),
    ],
)
def test_the_job_ends_and_says_why(poprun, warm, script, what, text):
    # The launcher tells the exit code of an instance that ends itself, so this is its own process.
    words = () if what == "dies" else warm
    done = poprun(
        "--num-instances", 2, "--num-replicas", 2, "--oversubscribe",
        *words, script(PROGRAM), what, timeout=90,
    )  # fmt: skip
    assert done.returncode == (7 if what == "dies" else 1), done.stderr
    assert text in done.stderr
    assert "trained" not in done.stdout
