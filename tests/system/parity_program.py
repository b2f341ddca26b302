"""Trains a small net through the public API and writes its weights; run by test_parity.py.

Argument: a folder. Every instance writes weights-DTYPE-INDEX.npz for float64 and float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

MICRO_BATCH, ACCUMULATION, STEPS, REPLICAS = 2, 2, 3, 8
GLOBAL_BATCH = MICRO_BATCH * ACCUMULATION * REPLICAS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.body(x)
        return scores, self.loss(scores, y)


def model_and_data(dtype):
    torch.manual_seed(7)
    net = Net().to(dtype)
    data = torch.randn(STEPS, GLOBAL_BATCH, 5, dtype=dtype)
    return net, data, torch.randint(0, 3, (STEPS, GLOBAL_BATCH))


def reference(dtype):
    """The same training as a plain PyTorch loop over the whole global batch."""
    net, data, labels = model_and_data(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(data, labels, strict=True):
        optimizer.zero_grad()
        net(x, y)[1].backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def train(dtype):
    """Train this instance's replicas on their part of every global batch; returns the weights."""
    net, data, labels = model_and_data(dtype)
    options = poptorch.DistributedOptions()
    options.Training.gradientAccumulation(ACCUMULATION)
    options.Emulator.doublePrecision(dtype == torch.float64)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    wrapped = poptorch.trainingModel(net, options, optimizer=optimizer)
    local = popdist_py.getNumLocalReplicas()
    first = popdist_py.getReplicaIndexOffset()
    for x, y in zip(data, labels, strict=True):
        # [accumulation][replica][micro-batch]: this instance takes the columns of its replicas.
        x = x.view(ACCUMULATION, REPLICAS, MICRO_BATCH, 5)[:, first : first + local]
        y = y.view(ACCUMULATION, REPLICAS, MICRO_BATCH)[:, first : first + local]
        scores, losses = wrapped(x.reshape(-1, 5), y.reshape(-1))
        assert scores.shape == (local * MICRO_BATCH, 3)
        assert losses.shape == ((local,) if local > 1 else ())
    wrapped.copyWeightsToHost()
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def main():
    popdist_py.init()
    for dtype in ("float64", "float32"):
        path = Path(sys.argv[1]) / f"weights-{dtype}-{popdist_py.getInstanceIndex()}.npz"
        np.savez(path, **train(getattr(torch, dtype)))


if __name__ == "__main__":
    main()
