"""Floating-point exceptions: operations that overflow, divide by zero or are invalid raise."""

from __future__ import annotations

import pytest
import torch
from support.models import WithLoss, quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch.execution.floating_point_traps import FloatingPointTraps

INFINITY = float("inf")
HALF, SINGLE = torch.float16, torch.float32


def trapping(replicas=1, execution="auto"):
    options = quiet_options().replicationFactor(replicas)
    options.Precision.enableFloatingPointExceptions(True)
    options.Emulator.replicaExecution(execution)
    return options


trapped = pytest.raises(poptorch.Error, match=r"^'poptorch_py_error': Floating point exception")


@pytest.mark.parametrize(
    ("function", "bad", "dtype"),
    [
        (lambda x: 1 / x, 0.0, SINGLE),
        (lambda x: x.sqrt(), -1.0, SINGLE),
        (lambda x: (x * 1e20) * 1e20, 1.0, SINGLE),
        (lambda x: x - x / 2, INFINITY, SINGLE),
        (lambda x: (x < 1).float(), float("nan"), SINGLE),
        (lambda x: x.clone().mul_(1e20).mul_(1e20), 1.0, SINGLE),
        (lambda x: x.log(), 0.0, SINGLE),
        (lambda x: x.half(), 1e6, SINGLE),
        (lambda x: x * x, 300.0, HALF),
        (lambda x: x @ x, 300.0, HALF),
        (lambda x: torch.zeros(2, 2, dtype=HALF).copy_(x), 1e6, SINGLE),
    ],
)
def test_results(function, bad, dtype):
    inference = poptorch.inferenceModel(function, trapping())
    inference(torch.full((2, 2), 1e-3, dtype=dtype))
    with trapped:
        inference(torch.full((2, 2), bad, dtype=dtype))
    poptorch.inferenceModel(function, quiet_options())(torch.full((2, 2), bad, dtype=dtype))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x.masked_fill(torch.eye(2, dtype=torch.bool), -INFINITY), -1),
        lambda x: torch.softmax(x + torch.full((2, 2), -INFINITY).triu(1), -1),
        lambda x: x.clone().add_(torch.full((2, 2), -INFINITY).triu(1)),
        lambda x: torch.where(x > 0, x, -INFINITY),
        lambda x: x.clamp(max=torch.tensor(INFINITY)),
        lambda x: nn.functional.pad(x, (1, 1), value=-INFINITY),
        lambda x: torch.full((2, 2), -INFINITY).half().float() + x,
    ],
)
def test_infinities_that_a_program_makes_pass_through(function):
    poptorch.inferenceModel(function, trapping())(torch.full((2, 2), 3.0))


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("replicas", [1, 2])
def test_running_statistics(dtype, replicas):
    training = poptorch.trainingModel(WithLoss(nn.BatchNorm1d(3)).to(dtype), trapping(replicas))
    x, y = torch.randn(8, 3).to(dtype), torch.zeros(8, 3).to(dtype)
    training(x, y)
    with trapped:
        training(x * (1e25 if dtype == SINGLE else 1e4), y)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_buffers(dtype):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("size", torch.ones(2, dtype=dtype))

        def forward(self, x):
            self.size.mul_(1e3)
            return x + self.size

    inference = poptorch.inferenceModel(Growing(), trapping())
    x = torch.ones(1, 2, dtype=dtype)
    assert inference(x)[0, 0] == pytest.approx(1001, rel=1e-3)
    with trapped:
        for _ in range(20):
            inference(x)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB", "LARS"])
def test_weights(kind, dtype):
    """The weights overflow in the update of the first call, whose loss and gradients are finite."""
    model = WithLoss(nn.Linear(2, 2)).to(dtype)
    optimizer = getattr(poptorch.optim, kind)(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, trapping(), optimizer)
    x, y = torch.ones(4, 2, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
    training(x, y)
    optimizer.param_groups[0]["lr"] = 3e38 if kind == "RMSprop" else 1e39
    training.setOptimizer(optimizer)
    with trapped:
        training(x, y)


def test_gradients_whose_sum_over_instances_overflows():
    """Sums of instances are not torch's, but an update that takes an infinity traps."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), INFINITY)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        with trapped, FloatingPointTraps():
            kind([weight], lr=0.1, foreach=True).step()
