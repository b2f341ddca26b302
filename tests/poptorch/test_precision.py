"""Number formats: half, mixed, doubles, stochastic rounding, and traps."""

from __future__ import annotations

import pytest
import torch
from poptorch.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.rounding import stochastic_half


def test_activations_decide_the_format_of_products():
    model = WithLoss(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    training = poptorch.trainingModel(model, quiet_options())
    before = model.model[0].weight.detach().clone()
    out, loss = training(torch.randn(8, 4).half(), torch.randn(8, 3).half())
    assert (out.dtype, loss.dtype) == (torch.float16, torch.float16)
    assert model.model[0].weight.dtype == torch.float32
    assert not torch.equal(model.model[0].weight.detach(), before)
    inference = poptorch.inferenceModel(nn.Linear(4, 2).half(), quiet_options())
    assert inference(torch.randn(1, 4)).dtype == torch.float32


def test_half_models_train_in_half():
    model = WithLoss(nn.Linear(4, 2)).half()
    training = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=64.0)
    )
    x, y = torch.randn(8, 4).half(), torch.zeros(8, 2).half()
    losses = [training(x, y)[1].item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    assert model.model.weight.dtype == torch.float16


def test_doubles_are_floats_unless_asked_for():
    model = Mlp().double()
    x, y = classified(4, dtype=torch.float64)
    out, loss = poptorch.trainingModel(model, quiet_options())(x, y)
    assert (out.dtype, loss.dtype) == (torch.float32, torch.float32)
    assert model.layers[0].weight.dtype == torch.float64
    model.destroy()
    options = quiet_options()
    options.Emulator.doublePrecision()
    out, _ = poptorch.trainingModel(model, options)(x, y)
    assert out.dtype == torch.float64


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
    assert moved[0] == 0
    assert moved[1] == pytest.approx(20e-4, rel=0.3)


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        (lambda x: 1 / x, 0.0),
        (lambda x: x.sqrt(), -1.0),
        (lambda x: (x * 1e20) * 1e20, 1.0),
        (lambda x: x - x / 2, float("inf")),
        (lambda x: (x < 1).float(), float("nan")),
    ],
)
def test_traps(function, bad):
    options = quiet_options()
    options.Precision.enableFloatingPointExceptions(True)
    inference = poptorch.inferenceModel(function, options)
    inference(torch.full((2,), 1e-3))
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        inference(torch.full((2,), bad))
    poptorch.inferenceModel(function, quiet_options())(torch.full((2,), bad))


def test_bytes_are_cast_on_the_device():
    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return self.inner((x.to(torch.float) - 127) / 128)

    model = Bytes()
    x = torch.randint(0, 255, (4, 3), dtype=torch.uint8)
    out = poptorch.inferenceModel(model, quiet_options())(x)
    torch.testing.assert_close(out, model(x).detach())
