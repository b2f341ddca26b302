"""Trains as one of several instances, prints the weights' bits, and sums of grouped weights.

Run by test_instances.py.
"""

from __future__ import annotations

import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

torch.set_num_threads(1)
popdist_py.init()
index, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x, y):
        out = self.layers(x.to(self.layers[0].weight.dtype))
        return out, nn.functional.cross_entropy(out.float(), y)


def train(half):
    """Train four steps of four replicas; only instance 0's first weights are those of all."""
    torch.manual_seed(0 if index == 0 else 100 + index)
    dtype = torch.float16 if half else torch.float32
    net = Net().to(dtype)
    options = poptorch.DistributedOptions().showCompilationProgressBar(False).randomSeed(5)
    options.Training.gradientAccumulation(2)
    options.Emulator.deterministicReduction()
    options.Precision.enableStochasticRounding(half)
    options.Training.setAutomaticLossScaling(half)
    optimizer = poptorch.optim.Adam(
        net.parameters(), lr=0.05, accum_type=dtype, first_order_momentum_accum_type=dtype
    )
    training = poptorch.trainingModel(net, options, optimizer)
    torch.manual_seed(1)
    for _ in range(4):
        x = torch.randn(2, 4, 3, 6)  # [accumulation][replica][micro-batch]
        y = torch.randint(0, 4, (2, 4, 3))
        mine = slice(index * 4 // count, (index + 1) * 4 // count)
        training(x[:, mine].reshape(-1, 6), y[:, mine].reshape(-1))
    return "".join(p.detach().numpy().tobytes().hex() for p in net.parameters())


class Scale(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(groups, 2))

    def forward(self, x):
        return poptorch.identity_loss(self.w * x, "sum")


def row_sums(kind, size, groups):
    """Train weights that groups of the replicas of two instances have for themselves."""
    model = Scale(groups)
    options = poptorch.DistributedOptions().showCompilationProgressBar(False)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    training.w.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
    training(torch.tensor([[1.0], [2.0], [4.0], [8.0]])[2 * index : 2 * index + 2].expand(2, 2))
    return model.w.sum(1).tolist()


print("float", index, train(half=False))
print("half", index, train(half=True))
if count == 2:
    print("orthogonal", index, *row_sums(poptorch.CommGroupType.Orthogonal, 2, 2))
    print("alone", index, *row_sums(poptorch.CommGroupType.NoGrouping, 1, 4))
