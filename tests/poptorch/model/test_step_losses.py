"""What a training model tells the launcher of the loss of each call."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import quiet_options

from popdist_py import heartbeat, poptorch
from popdist_py.poptorch import OutputMode


class Squares(torch.nn.Module):
    """Returns what its loss is asked to look like."""

    def __init__(self, reduction="mean", returns_loss=True):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.reduction = reduction
        self.returns_loss = returns_loss

    def forward(self, x):
        out = self.layer(x)
        loss = poptorch.identity_loss(out**2, self.reduction)
        return (out, loss) if self.returns_loss else out


@pytest.fixture
def told(monkeypatch):
    """Return the losses that the launcher is told."""
    losses = []

    def step(samples, loss):
        assert samples > 0
        losses.append(loss)

    monkeypatch.setattr(heartbeat, "step", step)
    return losses


def train(options, model, x):
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01)
    return poptorch.trainingModel(model, options, optimizer)(x)


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.All, OutputMode.Sum])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_the_mean_of_what_the_call_returns(told, mode, replicas, reduction):
    options = quiet_options().deviceIterations(2).outputMode(mode).replicationFactor(replicas)
    options.Training.gradientAccumulation(2)
    _, loss = train(options, Squares(reduction), torch.randn(4 * replicas * 5, 3))
    (mean,) = told
    assert type(mean) is float
    num_summed = 4 if mode == OutputMode.Sum else 1
    assert mean == pytest.approx(loss.double().mean().item() / num_summed, rel=1e-6)


def test_of_one_loss_it_is_the_very_number(told):
    _, loss = train(quiet_options(), Squares(), torch.randn(4, 3))
    assert told == [loss.item()]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_loss_that_is_no_finite_number_is_told(told, value):
    _, loss = train(quiet_options(), Squares(), torch.full((4, 3), value))
    assert not math.isfinite(told[0])
    assert repr(told) == repr([loss.item()])


def test_a_loss_that_the_program_does_not_get_is_not_known(told):
    train(quiet_options(), Squares(returns_loss=False), torch.randn(4, 3))
    assert told == [None]


def test_zeros_in_place_of_results_are_no_loss(told):
    options = quiet_options()
    options.enableSyntheticData(True)
    train(options, Squares(), torch.randn(4, 3))
    assert told == [None]
