"""Capturing a function as a graph: it does again what the function did, with other values."""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from popdist_py.poptorch.execution.capture import capture
from popdist_py.poptorch.execution.graph_code import function_of

TABLE = torch.arange(12.0).view(3, 4)


def changed_in_place(x, w):
    hidden = x @ w
    hidden.mul_(2).add_(1)
    mask = torch.zeros_like(hidden)
    mask[:, 1:] = 1
    return [hidden * mask]


def several_results(x, w):
    first, second = torch.unbind(x[:2])
    values, _ = torch.topk(x @ w, 2)
    parts = torch.split(x, 2)
    return [first - second, values, *parts, None]


def constants(x, w):
    shift = torch.tensor([1.0, 2.0, 3.0])
    shift[0] = 5
    number = torch.tensor(2.0).item()  # what follows from constants alone may be read
    return [x @ w * number + shift + TABLE.sum(1), x[:, TABLE[0] > 1]]


def normed(x, w):
    mean = torch.zeros(3)
    out = F.batch_norm(x @ w, mean, torch.ones(3), training=True)
    return [out, mean]


def gradient(x, w):
    weight = w.detach().requires_grad_()
    unused = x.detach().requires_grad_()
    with torch.enable_grad():
        loss = torch.tanh(x @ weight).exp().square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [weight, unused], allow_unused=True)]


def gradient_of_many(x, w):
    weight = w.detach().requires_grad_()

    def one(row):
        hidden = F.layer_norm(row @ weight, (3,))
        return F.dropout(hidden, 0.0), hidden.sigmoid().prod()

    with torch.enable_grad():
        outputs, losses = torch.func.vmap(one)(x)
        (result,) = torch.autograd.grad(losses, [weight], torch.ones_like(losses))
    return [outputs.detach(), result]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def own_derivative(x, w):
    weight = w.detach().requires_grad_()
    with torch.enable_grad():
        loss = Doubled.apply(x @ weight).sum()
    return list(torch.autograd.grad(loss, [weight]))


FUNCTIONS = (
    changed_in_place, several_results, constants, normed, gradient, gradient_of_many,
    own_derivative,
)  # fmt: skip


def arguments(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_graph_does_what_the_function_does(function):
    expected = [function(*arguments(seed)) for seed in (0, 1)]
    run = function_of(capture(function, arguments(0)), len(expected[0]))
    for seed in (0, 1):
        # Rewriting joins operations, which rounds otherwise.
        torch.testing.assert_close(run(*arguments(seed), None), expected[seed])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * x.sum().item()],
        lambda x: [x if bool((x > 0).all()) else -x],
        lambda x: [x[x > 0]],
        lambda x: [torch.nonzero(x)],
        lambda x: [x * torch.zeros(()).copy_(x[0, 0]).item()],
    ],
    ids=["item", "branch", "mask", "nonzero", "by way of a constant"],
)
def test_what_depends_on_values_is_not_captured(function):
    with pytest.raises(RuntimeError, match="needs the value of a tensor"):
        capture(function, arguments(0)[:1])


class ByNumPy(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return torch.from_numpy(np.square(x.numpy()))

    @staticmethod
    def backward(*_):
        return None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.from_numpy(x.numpy() * 2)],
        lambda x: [torch.from_numpy((x + 1).data.numpy() * 2)],
        lambda x: [x * torch.tensor(np.asarray(x))],
        lambda x: [x * torch.from_numpy(np.from_dlpack(x).copy())],
        lambda x: [ByNumPy.apply(x)],
    ],
    ids=["numpy", "data", "asarray", "dlpack", "function"],
)
def test_what_numpy_computes_is_not_captured(function):
    with pytest.raises(RuntimeError, match="no operation of torch"):
        capture(function, [torch.ones(2, 2)])


def test_numpy_may_read_constants():
    captured = capture(lambda x: [x * torch.from_numpy(TABLE.numpy() + 1)], [torch.ones(3, 4)])
    (result,) = function_of(captured, 1)(torch.full((3, 4), 2.0), None)
    assert torch.equal(result, 2 * (TABLE + 1))


def test_no_tensor_of_the_run_stays():
    made = []

    def function(x, w):
        hidden = x @ w
        made.append(weakref.ref(hidden))
        return [hidden.exp()]

    captured = capture(function, arguments(0))
    assert made[0]() is None
    assert not captured.constants


def test_capturing_needs_no_compiler_of_torch(monkeypatch):
    """Importing it takes longer than compiling most models."""
    for name in ("torch._dynamo", "torch._inductor"):
        monkeypatch.setitem(sys.modules, name, None)
    capture(gradient_of_many, arguments(0))
