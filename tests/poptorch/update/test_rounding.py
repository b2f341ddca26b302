"""Stochastic rounding of weights in half."""

from __future__ import annotations

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.update.rounding import stochastic_half


@pytest.mark.parametrize("value", [1.0 + 2**-12, -3.3, 1e-6, 5e-5, 0.0, 1.0])
def test_stochastic_rounding_is_right_in_the_mean(value):
    torch.manual_seed(0)
    values = torch.full((40000,), value)
    rounded = stochastic_half(values).float()
    step = (rounded.max() - rounded.min()).item()
    assert rounded.unique().numel() <= 2
    assert abs(rounded.mean().item() - value) <= 0.05 * step + 1e-12


def test_stochastic_rounding_lets_small_updates_through():
    options = quiet_options()
    options.Precision.enableStochasticRounding(True)
    moved = []
    before = torch.get_rng_state()
    for chosen in (quiet_options(), options):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(1000, dtype=torch.half))
        model.forward = lambda x, m=model: poptorch.identity_loss((m.weight * x).sum(), "sum")
        training = poptorch.trainingModel(
            model, chosen, torch.optim.SGD(model.parameters(), lr=1e-4)
        )
        for _ in range(20):
            training(torch.ones(1, dtype=torch.half))
        moved.append(1 - model.weight.detach().float().mean().item())
    assert torch.equal(torch.get_rng_state(), before)
    assert moved[0] == 0
    assert moved[1] == pytest.approx(20e-4, rel=0.3)
