"""Gradients and optimiser state in half, and the loss scaling that keeps them in range."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import lamb_and_lars, optim
from popdist_py.poptorch.checkpoint import TrainingCheckpoints


class Sum(nn.Module):
    """Loss ``sum(weight * x)``: the gradient of the weight is the sum of x."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x):
        return poptorch.identity_loss((self.weight.float() * x).sum(), "sum")


@pytest.mark.parametrize("how", ["auto", "loop", "deterministic"])
@pytest.mark.parametrize(
    ("accum_type", "expected"), [(torch.float16, -4096.0), (torch.float32, -4104.0)]
)
def test_half_gradients_lose_what_half_cannot_hold(how, accum_type, expected):
    """Half holds only even numbers from 2048 on, and multiples of 4 from 4096 on."""
    options = quiet_options().replicationFactor(2)
    options.Training.gradientAccumulation(5)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    if how == "deterministic":
        options.Emulator.deterministicReduction()
    else:
        options.Emulator.replicaExecution(how)
    x = torch.ones(10, 1)
    x[:2] = 2048
    model = Sum()
    training = poptorch.trainingModel(
        model, options, optim.SGD(model.parameters(), lr=1.0, accum_type=accum_type)
    )
    training(x)
    assert model.weight.item() == expected


@pytest.mark.parametrize(
    ("make", "reference", "names"),
    [
        (
            lambda p: optim.Adam(p, lr=0.01, first_order_momentum_accum_type=torch.float16),
            lambda p: torch.optim.Adam(p, lr=0.01),
            {"exp_avg": "Accl1"},
        ),
        (
            lambda p: optim.AdamW(p, lr=0.01, second_order_momentum_accum_type=torch.float16),
            lambda p: torch.optim.AdamW(p, lr=0.01),
            {"exp_avg_sq": "Accl2"},
        ),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, velocity_accum_type=torch.float16),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            {"momentum_buffer": "Accl1"},
        ),
        (
            lambda p: optim.LARS(p, lr=0.1, eeta=0.1, velocity_accum_type=torch.float16),
            lambda p: lamb_and_lars.LARS(p, lr=0.1, eeta=0.1),
            {"momentum_buffer": "Accl1"},
        ),
    ],
)
def test_half_state_is_rounded_after_every_step(make, reference, names):
    # With some weights, a sum in another order is rounded to another number of half precision.
    torch.manual_seed(0)
    model = Mlp()
    expected = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), reference(expected.parameters())
    training = poptorch.trainingModel(model, quiet_options(), ours)
    for step in range(4):
        if step == 2:  # a state that was saved and loaded goes on as if it had not been
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        training(*classified(8, seed=step))
        theirs.zero_grad()
        expected(*classified(8, seed=step))[1].backward()
        theirs.step()
        for state in theirs.state.values():
            for key in names:
                state[key] = state[key].half().float()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
    for name, value in ours.state_dict()["ipu_state"].items():
        is_half = name.partition("___")[0] in names.values()
        assert value.dtype == (torch.float16 if is_half else torch.float32)


def automatic(model, optimizer, **settings):
    options = quiet_options()
    options.Training.setAutomaticLossScaling(True)
    for name, value in settings.items():
        options._Popart.set(f"automaticLossScalingSettings.{name}", value)
    return poptorch.trainingModel(model, options, optimizer)


def test_automatic_loss_scaling_saves_small_gradients():
    moved = []
    for scaled in (False, True):
        model = Sum(torch.float16)
        optimizer = optim.SGD(model.parameters(), lr=1e4)
        training = (
            automatic(model, optimizer)
            if scaled
            else poptorch.trainingModel(model, quiet_options(), optimizer)
        )
        for _ in range(20):
            training(torch.full((1, 1), 1e-8))
        moved.append(-model.weight.item())
    # Without scaling nothing arrives; the first scales are still too small.
    assert moved[0] == 0
    assert moved[1] == pytest.approx(20 * 1e-4, rel=0.3)


@pytest.mark.parametrize(
    ("gradient", "settings", "factors"),
    [
        (1.0, {}, [2, 4, 8, 16]),
        (3000.0, {}, [2, 4, 2, 4]),
        (1e6, {}, [0.5, 0.25, 0.125, 0.0625]),
        (float("nan"), {}, [0.5, 0.25, 0.125, 0.0625]),
        (1.0, {"updatePeriod": 2}, [1, 2, 2, 4]),
        (1.0, {"binEdgeLocation": 3 / 65504}, [2, 4, 2, 4]),
        (1e6, {"thresholdUpperCountProportion": 1.0}, [2, 4, 8, 16]),
    ],
)
def test_automatic_loss_scaling_halves_or_doubles(gradient, settings, factors):
    model = Sum()
    training = automatic(model, optim.SGD(model.parameters(), lr=0.0), **settings)
    found = []
    for _ in factors:
        training(torch.full((1, 1), gradient))
        found.append(training._compiled.program.training.scaler.factor)
    assert found == factors


def scaled_training():
    """A training whose gradients reach half's range only by their scale."""
    model = Sum(torch.float16)
    return automatic(model, optim.SGD(model.parameters(), lr=1e4), updatePeriod=2)


def scaler_of(training):
    return training._compiled.program.training.scaler


def test_automatic_loss_scaling_goes_on_from_a_checkpoint(tmp_path):
    small = torch.full((1, 1), 1e-8)
    training = scaled_training()
    for _ in range(15):
        training(small)
    TrainingCheckpoints(tmp_path, training).save(15)
    resumed = scaled_training()
    TrainingCheckpoints(tmp_path, resumed).resume()
    for _ in range(3):
        training(small)
        resumed(small)
        assert scaler_of(resumed).state() == scaler_of(training).state()
    assert training.model.weight.item() == resumed.model.weight.item() != 0


def test_a_checkpoint_without_the_loss_scaling_is_loaded():
    """Earlier versions saved none."""
    small, training = torch.ones(1, 1), scaled_training()
    training(small)
    shared, own = training.training_state(), training.instance_state()
    del shared["loss_scaling"]
    resumed = scaled_training()
    resumed.load_training_state(shared, [own])
    resumed(small)
    assert scaler_of(resumed).state() == {"factor": 1.0, "steps": 1}


def test_automatic_loss_scaling_goes_on_with_another_optimizer():
    training = scaled_training()
    for _ in range(5):
        training(torch.ones(1, 1))
    before = scaler_of(training)
    training.setOptimizer(optim.Adam(training.model.parameters(), lr=0.1))
    assert scaler_of(training) is not before
    assert scaler_of(training).state() == before.state() == {"factor": 4.0, "steps": 5}


def test_automatic_loss_scaling_changes_no_float32_result():
    weights = []
    for chosen in (
        automatic,
        lambda *given: poptorch.trainingModel(given[0], quiet_options(), given[1]),
    ):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = optim.Adam(model.parameters(), lr=0.01, loss_scaling=3.0, max_grad_norm=0.5)
        training = chosen(model, optimizer)
        for step in range(20):
            training(*classified(8, seed=step))
            training.setOptimizer(optimizer)
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)
