"""Tensors of a compiled model by name: settings, gradients, updates and results of operations."""

from __future__ import annotations

import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


def test_settings_of_the_optimizer_can_be_anchored():
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=4.0)
    options = quiet_options()
    options.anchorTensor("rate", "scaledLearningRate0___specific___layers.0.bias")
    options.anchorTensor("scale", "lossScaling_FLOAT")
    training = poptorch.trainingModel(model, options, optimizer)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        training.setOptimizer(optimizer)
        training(*classified(2))
        assert training.getAnchoredTensor("rate").item() == rate / 4
        assert training.getAnchoredTensor("scale").item() == 4


def test_anchors_show_gradients_and_updates():
    model = WithLoss(nn.Linear(2, 1, bias=False))
    weight = model.model.weight.detach().clone()
    options = quiet_options().deviceIterations(2).replicationFactor(2)
    options.anchorTensor("gradient", "Gradient___model.weight", poptorch.OutputMode.All)
    options.anchorTensor("weight", "UpdatedVar___model.weight")
    options.anchorTensor("x", "input", poptorch.OutputMode.EveryN, 2)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.arange(8.0).reshape(4, 2)
    y = torch.zeros(4, 1)
    training(x, y)
    expected = torch.cat([2 * (row @ weight.T) * row for row in x.split(1)])
    torch.testing.assert_close(training.getAnchoredTensor("gradient"), expected)
    assert training.getAnchoredTensor("weight").shape == (2, 2)
    assert torch.equal(training.getAnchoredTensor("x"), x[2:])
    with pytest.raises(AssertionError, match="'other'"):
        training.getAnchoredTensor("other")


class Scoped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.head = nn.Linear(3, 1)

    def forward(self, x, y):
        x = self.body(x)
        with poptorch.NameScope("extra"):
            x = (x * 2 * 3).sort().values
        return torch.nn.functional.mse_loss(self.head(x), y)


OPERATIONS = [
    "body/0/linear", "body/1/relu", "extra/mul", "extra/mul/1", "extra/sort", "extra/sort:1",
    "head/linear", "mse_loss",
]  # fmt: skip


@pytest.mark.parametrize("scopes", [True, False])
def test_operations_are_named_by_their_scopes(scopes):
    options = quiet_options()
    if not scopes:
        options.disableModuleNamescope()
    training = poptorch.trainingModel(Scoped(), options)
    training.compile(torch.ones(1, 2), torch.ones(1, 1))
    without = ["linear", "relu", *OPERATIONS[2:6], "linear/1", "mse_loss"]
    names = training.getTensorNames()
    assert [name for name in names if name in OPERATIONS + without] == (
        OPERATIONS if scopes else without
    )


@pytest.mark.parametrize("mode", [poptorch.OutputMode.All, poptorch.OutputMode.Sum])
def test_anchors_show_results_of_operations(mode):
    options = quiet_options().deviceIterations(2).replicationFactor(2).outputMode(mode)
    for name in OPERATIONS:
        options.anchorTensor(name, name)
    model = Scoped()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    losses = training(x, y)
    hidden = model.body(x).detach()
    scaled, order = (hidden * 6).sort()
    values = [model.body[0](x), hidden, hidden * 2, hidden * 6, scaled, order, model.head(scaled)]
    for name, value in zip(OPERATIONS, values, strict=False):
        whole = value.detach()
        if mode == poptorch.OutputMode.Sum:
            whole = whole[:2] + whole[2:]
        torch.testing.assert_close(training.getAnchoredTensor(name), whole)
    assert torch.equal(training.getAnchoredTensor("mse_loss"), losses)


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        ("body/0/linaer", "body/0/linear"),
        ("input/2", "input/1"),
        ("Gradient___head.wieght", "Gradient___head.weight"),
    ],
)
def test_unknown_tensors_cannot_be_anchored(wanted, nearest):
    options = quiet_options()
    options.anchorTensor("a", wanted)
    with pytest.raises(
        poptorch.Error, match=f"'{wanted}': .* nearest names of tensors are .*{nearest}"
    ):
        poptorch.trainingModel(Scoped(), options)(torch.ones(1, 2), torch.ones(1, 1))


def test_weights_that_do_not_train_have_no_gradient_to_anchor():
    options = quiet_options()
    options.anchorTensor("a", "Gradient___head.weight")
    model = Scoped()
    training = poptorch.trainingModel(
        model, options, torch.optim.SGD(model.body.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.Error, match="no such tensor"):
        training(torch.ones(1, 2), torch.ones(1, 1))
