"""The registry of replica back ends: one contract for every row, and rows of others."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import backends
from popdist_py.poptorch.compilation.backends import BACKENDS, Backend
from popdist_py.poptorch.execution.replicas import LoopReplicas

REFERENCE = BACKENDS[0]


def use(monkeypatch, *rows):
    """Let the registry hold the reference and these rows."""
    monkeypatch.setattr(backends, "BACKENDS", (REFERENCE, *rows))


class Normed(Mlp):
    """A model with a buffer of each replica's own."""

    def __init__(self):
        super().__init__(8)
        self.layers.insert(0, nn.BatchNorm1d(8))


class Dropping(Mlp):
    """A model that draws random numbers."""

    def __init__(self):
        super().__init__(8)
        self.layers.insert(0, nn.Dropout(0.5))


MODELS = {"layers": lambda: Mlp(8), "buffers": Normed, "random numbers": Dropping}


def train(execution, make, accumulation, group_size, order):
    torch.manual_seed(0)
    model = make()
    options = quiet_options().replicationFactor(4).broadcastBuffers(False).randomSeed(7)
    options.outputMode(poptorch.OutputMode.All).inputReplicaGrouping(group_size, order)
    options.Training.gradientAccumulation(accumulation)
    options.Emulator.set(replica_execution=execution)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, loss_scaling=8.0, max_grad_norm=1.0
    )
    training = poptorch.trainingModel(model, options, optimizer)
    outputs = []
    for step in range(2):
        outputs += training(*classified(16 * accumulation // group_size, 8, seed=step))
    found = training._compiled.program.back_end
    return found, [*outputs, *copy.deepcopy(model.state_dict()).values()]


@pytest.mark.parametrize(
    ("name", "accumulation", "group_size", "order"),
    [
        ("layers", 1, 1, poptorch.CommGroupType.Consecutive),
        ("buffers", 3, 2, poptorch.CommGroupType.Consecutive),
        ("random numbers", 2, 2, poptorch.CommGroupType.Orthogonal),
        ("buffers", 1, 4, poptorch.CommGroupType.Consecutive),
    ],
)
@pytest.mark.parametrize("row", BACKENDS[1:], ids=lambda row: row.name)
def test_a_back_end_computes_what_the_reference_computes(
    row, name, accumulation, group_size, order, monkeypatch
):
    settings = (MODELS[name], accumulation, group_size, order)
    _, expected = train(REFERENCE.name, *settings)
    refused = []

    def can_run(model):
        reason = row.can_run(model)
        refused.append(reason)
        return reason

    use(monkeypatch, Backend(name="row", can_run=can_run, make=row.make))
    found, results = train("row", *settings)
    # A row runs what it does not refuse with a reason.
    assert found == "row" if refused == [None] else refused[0]
    for ours, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


class Toy(LoopReplicas):
    """A back end of another device, which the choice has never heard of."""


def toy(**changes):
    row = {"can_run": lambda _: None, "make": lambda model, *_: Toy(model)}
    return Backend(name="toy", option="device", **{**row, **changes})


@pytest.mark.parametrize("execution", ["toy", "device"])
def test_another_back_end_is_one_row(execution, monkeypatch):
    use(monkeypatch, toy())
    found, _ = train(execution, MODELS["layers"], 1, 1, poptorch.CommGroupType.Consecutive)
    assert found == "toy"


class Wrong(LoopReplicas):
    def run(self, call, inputs, number, scale):
        return super().run(call, inputs, number, 2 * scale)


def broken(*_):
    raise MemoryError("the device is full")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (toy(can_run=lambda _: "no such device here"), "no such device here"),
        (toy(make=broken), "MemoryError: the device is full"),
        (toy(make=lambda model, *_: Wrong(model)), "toy: its gradients are not those of the loop"),
    ],
    ids=["refuses", "fails", "differs"],
)
def test_a_back_end_that_cannot_run_says_why(row, reason, monkeypatch):
    use(monkeypatch, row)
    settings = (MODELS["layers"], 1, 1, poptorch.CommGroupType.Consecutive)
    with pytest.raises(poptorch.Error, match=f"device.*not possible.*{reason}"):
        train("device", *settings)
    assert train("auto", *settings)[0] == REFERENCE.name


class Inverting(nn.Module):
    """A model that zeros in place of its large product stop, after it has left a list half done."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(300) * 2)
        self.table = nn.Embedding(2, 300)
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))
        self.parts = []

    def forward(self, x, y):
        self.parts.append(x @ self.weight)
        self.position.add_(1)
        self.parts.append(self.table(self.position - 1))
        self.parts.append(x @ torch.linalg.inv(self.weight @ self.weight))
        out = sum(self.parts)
        self.parts.clear()
        self.position.sub_(1)
        return out, nn.functional.cross_entropy(out, y)


def test_what_zeros_stop_is_recorded_all_the_same():
    model = Inverting()
    options = quiet_options().replicationFactor(2).broadcastBuffers(False)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    generator = torch.Generator().manual_seed(0)
    training.compile(torch.randn(500, 300, generator=generator), torch.arange(500) % 3)
    assert training._compiled.program.back_end == "fused graph"
    assert not model.parts
