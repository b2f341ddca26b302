"""Weights in half: their update in float32, and how it is rounded."""

from __future__ import annotations

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.half_weights import stochastic_half


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


# Of a block of 131072 elements: a few, some that fill it, several of it, and a layout of its own.
SHAPES = [(3, 5), (7,), (131050,), (300, 900), (131072,), (2, 3, 4, 4)]


def gradients_of(step, parameters):
    """Return half gradients, one of them in another order in memory, and one missing."""
    torch.manual_seed(step)
    gradients = [torch.randn(p.shape).half() for p in parameters]
    gradients[0] = torch.randn(5, 3).half().t()
    if step == 2:
        gradients[1] = None
    return gradients


@pytest.mark.parametrize(
    ("kind", "settings", "threads"),
    [
        (torch.optim.SGD, {}, 1),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}, 2),
        (torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}, 1),
        (torch.optim.AdamW, {"maximize": True}, 1),
        (torch.optim.RMSprop, {}, 1),
    ],
)
def test_updates_of_halves_are_torchs_in_float32_rounded_once(kind, settings, threads):
    torch.manual_seed(0)
    halves = [nn.Parameter(torch.randn(shape).half()) for shape in SHAPES]
    halves[-1].data = halves[-1].data.to(memory_format=torch.channels_last)
    floats = [nn.Parameter(half.detach().float()) for half in halves]

    def made(kind, parameters, **how):
        groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.5}]
        return kind(groups, lr=0.1, **settings, **how)

    how = {"foreach": True} if kind is torch.optim.RMSprop else {"fused": True}
    reference = made(kind, floats, **how)
    names = {str(index): half for index, half in enumerate(halves)}
    source = made(getattr(poptorch.optim, kind.__name__, kind), halves)
    device = DeviceOptimizer(source, lambda parameter: [parameter], names)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step in range(4):
        for half, single, gradient in zip(halves, floats, gradients_of(step, halves), strict=True):
            half.grad = gradient
            single.grad = None if gradient is None else gradient.float() / 4
        device.step(4.0)
        reference.step()
        with torch.no_grad():
            for half, single in zip(halves, floats, strict=True):
                single.copy_(single.half())
                assert torch.equal(half, single.half())
    torch.set_num_threads(before)
    for name, value in device.state_tensors().items():
        rounded = floats[int(name.rpartition("_")[2])]
        kept = {"Accl1": 0, "Accl2": 1, "Step": -1}[name.partition("___")[0]]
        values = list(reference.state[rounded].values())
        values = [v for v in values if v.dim()] + [v for v in values if not v.dim()]
        assert torch.equal(value, values[kept])
