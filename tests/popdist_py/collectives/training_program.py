"""Trains a net with BatchNorm and dropout and writes its weights; run by test_training.py.

The arguments are a folder, and a way of joining for each training, ``A=1,B=2``. TEST_REPLICAS is
the total number of replicas, and TEST_STEPS is the number of steps. TEST_DETERMINISTIC=no turns the
deterministic mode off.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from jobs import ways
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.update import gradient_buckets

MICRO_BATCH, ACCUMULATION = 3, 2
in_backward = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(144, 500),
            nn.Tanh(),
            nn.Linear(500, 3),
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.body(x), labels)


def optimizer_of(kind, net):
    if kind == "sgd":
        return poptorch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return poptorch.optim.Adam(net.parameters(), lr=0.01)


def train(kind, replicas, steps, deterministic):
    """Train and return the weights; every global replica always gets the same samples."""
    torch.manual_seed(7)
    net = Net()
    per_replica = ACCUMULATION * MICRO_BATCH
    data = torch.randn(steps, replicas, ACCUMULATION, MICRO_BATCH, 1, 8, 8)
    labels = torch.randint(0, 3, (steps, replicas, ACCUMULATION, MICRO_BATCH))
    local = replicas // popdist_py.getNumInstances()
    options = poptorch.Options()
    options.replicationFactor(local)
    options.randomSeed(11)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Emulator.deterministicReduction(deterministic)
    instance = popdist_py.getInstanceIndex()
    options.Distributed.configureProcessId(instance, popdist_py.getNumInstances())
    model = poptorch.trainingModel(net, options, optimizer=optimizer_of(kind, net))
    mine = slice(instance * local, (instance + 1) * local)
    for x, y in zip(data[:, mine].transpose(1, 2), labels[:, mine].transpose(1, 2), strict=True):
        model(x.reshape(local * per_replica, 1, 8, 8), y.reshape(local * per_replica))
    model.copyWeightsToHost()
    return {f"{kind} {name}": p.detach().numpy() for name, p in net.named_parameters()}


def count_reductions_in_backward():
    reduce_next = gradient_buckets.Buckets._start_next

    def counted(self):
        in_backward.append(self._is_open)
        reduce_next(self)

    gradient_buckets.Buckets._start_next = counted
    gradient_buckets._BUCKET_BYTES = 10_000


def main():
    torch.set_num_threads(1 + int(os.environ.get("POPDIST_LOCAL_INSTANCE_INDEX", "0")) % 2)
    count_reductions_in_backward()
    for number, (way, comm) in enumerate(ways(sys.argv[2:])):
        replicas = int(os.environ.get("TEST_REPLICAS", "8"))
        steps = int(os.environ.get("TEST_STEPS", "20"))
        deterministic = os.environ.get("TEST_DETERMINISTIC") != "no"
        in_backward.clear()
        weights = {}
        for kind in ("sgd", "adam"):
            weights |= train(kind, replicas, steps, deterministic)
        np.savez(Path(sys.argv[1]) / f"weights-{number}-{comm.instance_index}.npz", **weights)
        mesh = type(getattr(getattr(comm, "_slice_owners", None), "mesh", None)).__name__
        print(f"[{way}] {sum(in_backward)} of {len(in_backward)} buckets in backward, {mesh}")


main()
