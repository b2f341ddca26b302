"""The optimisers of the CNN programs: which weights decay, which formats, and that they train."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.models import quiet_options
from torch import nn

from examples import cnn_programs as cnns
from popdist_py import poptorch

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]
KINDS = {
    "SGD": poptorch.optim.SGD,
    "momentum": poptorch.optim.SGD,
    "RMSProp": poptorch.optim.RMSprop,
    "LARS": poptorch.optim.LARS,
}
VECTORS = {"0.bias", "1.weight", "1.bias", "4.bias"}  # biases, and both of the norm


@pytest.fixture(scope="module")
def optimizers():
    with cnns.imported():
        yield cnns.module("optimizers")


def options(optimiser, **given):
    """Return the defaults of the programs, and what is given."""
    return SimpleNamespace(**{
        "optimiser": optimiser, "momentum": 0.9, "rmsprop_decay": 0.9, "rmsprop_epsilon": 1e-3,
        "lars_eeta": 1e-3, "lars_epsilon": 0.0, "weight_decay": 1e-4, "loss_scaling": 128.0,
        "precision": "16.16",
    } | given)  # fmt: skip


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        )

    def forward(self, images, labels):
        scores = super().forward(images)
        return scores, nn.functional.cross_entropy(scores, labels)


@pytest.mark.parametrize("optimiser", KINDS)
def test_norms_and_biases_do_not_decay(optimizers, optimiser):
    network = Network()
    made = optimizers.make(options(optimiser), network, 0.5)
    assert type(made) is KINDS[optimiser]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    kernels, vectors = made.param_groups
    assert {names[id(p)] for p in kernels["params"]} == {"0.weight", "4.weight"}
    assert {names[id(p)] for p in vectors["params"]} == VECTORS
    assert (kernels["weight_decay"], vectors["weight_decay"]) == (1e-4, 0.0)
    assert kernels["momentum"] == vectors["momentum"] == (0.0 if optimiser == "SGD" else 0.9)
    assert (kernels["lr"], vectors["lr"]) == (0.5, 0.5)
    if optimiser == "LARS":
        assert (kernels["adapt"], vectors["adapt"]) == (True, False)


def test_the_options_of_an_optimiser_reach_it(optimizers):
    network = Network()
    lars = optimizers.make(options("LARS", lars_eeta=0.02, lars_epsilon=1e-5), network, 0.5)
    assert (lars.param_groups[0]["eeta"], lars.param_groups[0]["epsilon"]) == (0.02, 1e-5)
    given = {"rmsprop_decay": 0.8, "rmsprop_epsilon": 0.1, "momentum": 0.5}
    rmsprop = optimizers.make(options("RMSProp", **given), network, 0.5)
    assert rmsprop.use_tf_variant
    for group in rmsprop.param_groups:
        assert (group["alpha"], group["eps"], group["momentum"]) == (0.8, 0.1, 0.5)


@pytest.mark.parametrize(
    ("precision", "scaling", "state"),
    [("16.16", 128.0, torch.float16), ("16.32", 128.0, torch.float32),
     ("32.32", 1.0, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("optimiser", KINDS)
def test_formats_and_loss_scaling_go_with_the_precision(
    optimizers, optimiser, precision, scaling, state
):
    made = optimizers.make(options(optimiser, precision=precision), Network(), 0.5)
    assert (made.loss_scaling, made.accum_type) == (scaling, state)
    if optimiser == "RMSProp":
        assert made.first_order_momentum_accum_type == state
        assert made.second_order_momentum_accum_type == torch.float32
    else:
        assert made.velocity_accum_type == state


@pytest.mark.parametrize("optimiser", KINDS)
@pytest.mark.parametrize("precision", ["16.16", "32.32"])
def test_every_optimiser_trains_from_a_rate_of_0_on(optimizers, optimiser, precision):
    """The warm-up begins with a rate of 0, which changes nothing; later ones do."""
    torch.manual_seed(0)
    network = Network()
    dtype = torch.float32 if precision == "32.32" else torch.float16
    network = network.to(dtype)
    optimizer = optimizers.make(options(optimiser, precision=precision), network, 0.0)
    model = poptorch.trainingModel(network, quiet_options(), optimizer)
    images, labels = torch.randn(8, 3, 4, 4).to(dtype), torch.tensor([0, 1] * 4)
    before = [p.detach().clone() for p in network.parameters()]
    first = model(images, labels)[1]
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    rate = {"LARS": 10.0, "RMSProp": 0.01}.get(optimiser, 0.1)
    optimizers.set_rate(optimizer, rate)
    model.setOptimizer(optimizer)
    for _ in range(20):
        last = model(images, labels)[1]
    assert math.isfinite(last)
    assert last < 0.8 * first
    model.destroy()
