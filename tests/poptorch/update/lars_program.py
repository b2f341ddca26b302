"""Trains a small net with LARS and writes its weights and velocities; run by test_lars.py.

Argument: a folder. Every instance writes INDEX.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

REPLICAS, MICRO_BATCH, ACCUMULATION, STEPS = 4, 2, 2, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.body(x)
        return scores, self.loss(scores, y)


def train(options, first):
    """Train on the micro-batches of these replicas, the first of which has the index ``first``."""
    local = options.replication_factor
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Emulator.deterministicReduction(True)
    torch.manual_seed(3)
    net = Net()
    x = torch.randn(STEPS, ACCUMULATION, REPLICAS, MICRO_BATCH, 1, 6, 6)
    y = torch.randint(0, 3, (STEPS, ACCUMULATION, REPLICAS, MICRO_BATCH))
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "adapt": False, "weight_decay": 0.0}]
    optimizer = poptorch.optim.LARS(groups, lr=1.0, eeta=0.1)
    model = poptorch.trainingModel(net, options, optimizer)
    for images, labels in zip(x, y, strict=True):
        own = slice(first, first + local)
        model(images[:, own].reshape(-1, 1, 6, 6), labels[:, own].reshape(-1))
    model.copyWeightsToHost()
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return {**weights, **optimizer.state_dict()["ipu_state"]}


def main():
    popdist_py.init()
    options = poptorch.DistributedOptions()
    trained = train(options, popdist_py.getReplicaIndexOffset())
    torch.save(trained, Path(sys.argv[1]) / f"{popdist_py.getInstanceIndex()}.pt")


if __name__ == "__main__":
    main()
