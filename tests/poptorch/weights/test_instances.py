"""Several instances of one job: shared first weights, and the same bits for every split."""

from __future__ import annotations

import contextlib
import os
from unittest.mock import patch

import pytest
import torch
from torch import nn

import popdist_py
from popdist_py import poptorch

torch.set_num_threads(1)
pytestmark = pytest.mark.mpi
REPLICAS = 4


@contextlib.contextmanager
def all_replicas():
    """Have the instances run all replicas between them: they were started with one each."""
    index, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
    own = REPLICAS // count
    variables = {
        "POPDIST_NUM_TOTAL_REPLICAS": str(REPLICAS),
        "POPDIST_NUM_LOCAL_REPLICAS": str(own),
        "POPDIST_REPLICA_INDEX_OFFSET": str(own * index),
    }
    popdist_py.context.finalize()
    with patch.dict(os.environ, variables):
        yield
        popdist_py.context.finalize()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x, y):
        out = self.layers(x.to(self.layers[0].weight.dtype))
        return out, nn.functional.cross_entropy(out.float(), y)


def _bits_of_an_instance(half):
    with all_replicas():
        return _bits(half, poptorch.DistributedOptions())


def _bits(half, options):
    """Train four steps of four replicas; only instance 0's first weights are those of all."""
    index, count = popdist_py.getInstanceIndex(), popdist_py.getNumInstances()
    torch.manual_seed(0 if index == 0 else 100 + index)
    dtype = torch.float16 if half else torch.float32
    net = Net().to(dtype)
    options.showCompilationProgressBar(False).randomSeed(5)
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
        x = torch.randn(2, REPLICAS, 3, 6)  # [accumulation][replica][micro-batch]
        y = torch.randint(0, 4, (2, REPLICAS, 3))
        mine = slice(index * REPLICAS // count, (index + 1) * REPLICAS // count)
        training(x[:, mine].reshape(-1, 6), y[:, mine].reshape(-1))
    return [p.detach().view(torch.uint8).tolist() for p in net.parameters()]


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_split_ends_with_the_same_bits(instances, count, half):
    expected = _bits(half, poptorch.Options().replicationFactor(REPLICAS))
    found = instances.run(_bits_of_an_instance, half, count=count)
    assert found == [expected] * count


class Scale(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(groups, 2))

    def forward(self, x):
        return poptorch.identity_loss(self.w * x, "sum")


def _row_sums(kind, size, groups):
    """Train weights that groups of the replicas of two instances have for themselves."""
    index = popdist_py.getInstanceIndex()
    mine = torch.tensor([[1.0], [2.0], [4.0], [8.0]])[2 * index : 2 * index + 2]
    model = Scale(groups)
    with all_replicas():
        options = poptorch.DistributedOptions().showCompilationProgressBar(False)
        training = poptorch.trainingModel(
            model, options, poptorch.optim.SGD(model.parameters(), lr=1.0)
        )
        training.w.replicaGrouping(kind, size, poptorch.VariableRetrievalMode.OnePerGroup)
        training(mine.expand(2, 2))
        return model.w.sum(1).tolist()


@pytest.mark.parametrize(
    ("kind", "size", "sums"),
    [
        (poptorch.CommGroupType.Orthogonal, 2, [-2.5, -5.0]),
        (poptorch.CommGroupType.NoGrouping, 1, [-0.5, -1.0, -2.0, -4.0]),
    ],
    ids=["orthogonal", "alone"],
)
def test_weights_grouped_over_the_replicas_of_several_instances(instances, kind, size, sums):
    assert instances.run(_row_sums, kind, size, len(sums)) == [sums, sums]
