"""Recording a function as a graph: it does again what the function did, with other values."""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from popdist_py.poptorch.execution.replica_graphs import recording
from popdist_py.poptorch.execution.replica_graphs.graph_code import function_of
from popdist_py.poptorch.execution.replica_graphs.recording import ZerosRefused, record

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
    run = function_of(record(function, arguments(0)), len(expected[0]))
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
def test_what_depends_on_values_is_not_recorded(function):
    with pytest.raises(RuntimeError, match="depends on the values of a tensor"):
        record(function, arguments(0)[:1])


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
def test_what_numpy_computes_is_not_recorded(function):
    with pytest.raises(RuntimeError, match="operation of NumPy on a tensor"):
        record(function, [torch.ones(2, 2)])


def test_numpy_may_read_constants():
    captured = record(lambda x: [x * torch.from_numpy(TABLE.numpy() + 1)], [torch.ones(3, 4)])
    (result,) = function_of(captured, 1)(torch.full((3, 4), 2.0), None)
    assert torch.equal(result, 2 * (TABLE + 1))


def test_no_tensor_of_the_run_stays():
    made = []

    def function(x, w):
        hidden = x @ w
        made.append(weakref.ref(hidden))
        return [hidden.exp()]

    captured = record(function, arguments(0))
    assert made[0]() is None
    assert not captured.constants


def test_recording_needs_no_compiler_of_torch(monkeypatch):
    """Importing it takes longer than compiling most models."""
    for name in ("torch._dynamo", "torch._inductor"):
        monkeypatch.setitem(sys.modules, name, None)
    record(gradient_of_many, arguments(0))


def nhwc(x):
    """Return an image [1, ...] with one channel as it comes from [..., height, width, channels]."""
    return x.permute(0, 3, 1, 2) if x.shape[-1] == 1 else x.flatten(1)


def columns(x):
    return x.transpose(1, 2).unsqueeze(3)


def pixels(x):
    return x.contiguous(memory_format=torch.channels_last).mean((2, 3), keepdim=True)


def image(*shape, dtype=torch.float32, memory_format=torch.contiguous_format):
    return torch.ones(shape, dtype=dtype).contiguous(memory_format=memory_format)


LARGE = {
    "mm": (lambda x, w: x @ w, (256, 300), (300, 256)),
    "addmm": (F.linear, (4, 64, 300), (128, 300)),
    "transposed": (lambda x, w: x.t() @ w.t(), (300, 256), (256, 300)),
    "bmm": (torch.bmm, (8, 64, 300), (8, 300, 64)),
    "bmm of rows": (lambda x, w: x.mT @ w.mT, (8, 300, 64), (8, 64, 300)),
    "addbmm": (lambda x, w: torch.baddbmm(x, x, w), (8, 300, 300), (8, 300, 300)),
    "convolution": (F.conv2d, (4, 16, 32, 32), (32, 16, 3, 3)),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (4, 16, 33, 32), (8, 16, 3, 3)),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=16), (4, 16, 32, 32), (32, 1, 3, 3)),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=2), (4, 16, 32, 32), (8, 16, 3, 3)),
    "upwards": (F.conv_transpose2d, (4, 16, 32, 32), (16, 8, 3, 3)),
    "one dimension": (F.conv1d, (4, 16, 2000), (8, 16, 5)),
    "three": (F.conv3d, (2, 4, 16, 24, 24), (8, 4, 3, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float16, marks=pytest.mark.sweep),
        pytest.param(torch.float64, marks=pytest.mark.sweep),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large_products_have_the_shapes_and_strides_of_real_ones(
    name, memory_format, dtype, monkeypatch
):
    """Without oneDNN, as graphs are recorded."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    operation, of_input, of_weight = LARGE[name]
    if len(of_input) != 4:
        memory_format = torch.contiguous_format
    given = (
        image(*of_input, dtype=dtype, memory_format=memory_format),
        image(*of_weight, dtype=dtype),
    )

    def gradients(x, w):
        both = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.enable_grad():
            result = operation(*both)
            return [result.detach(), *torch.autograd.grad(result.square().sum(), both)]

    made, make = [], recording._blank
    monkeypatch.setattr(recording, "_blank", lambda *args: made.append(args[0]) or make(*args))
    blank = record(gradients, given)
    assert len(made) >= 2
    real = record(gradients, given, is_real=True)
    assert [described(node) for node in blank.graph.nodes] == [
        described(node) for node in real.graph.nodes
    ]
    run = function_of(blank, 3)
    torch.testing.assert_close(run(*given, None), gradients(*given))


AMBIGUOUS = {
    "one channel": (lambda x, w: nhwc(F.conv2d(nhwc(x), w)), (100, 28, 28, 1), (4, 1, 3, 3)),
    "one column": (lambda x, w: F.conv2d(columns(x), w).squeeze(3), (8, 600, 16), (4, 16, 3, 1)),
    "one pixel": (lambda x, w: F.conv2d(pixels(x), w), (512, 200, 4, 4), (400, 200, 1, 1)),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_images_of_one_channel_or_column_are_recorded_as_they_lie(name):
    operation, of_input, of_weight = AMBIGUOUS[name]
    given = image(*of_input), image(*of_weight)

    def flattened(x, w):
        return [operation(x, w).relu().flatten(1) + 1]

    run = function_of(record(flattened, given), 1)
    torch.testing.assert_close(run(*given, None), flattened(*given))


def described(node):
    if (value := node.meta.get("val")) is None:
        return node.target
    return node.target, value.shape, value.stride(), value.dtype


LARGE_MATRIX = (torch.arange(90_000.0) % 7).view(300, 300)


def test_large_products_are_not_computed_unless_they_are_constants():
    seen = []

    def function(x, _):
        seen.append(x @ LARGE_MATRIX)
        return [seen[0] * (LARGE_MATRIX @ LARGE_MATRIX).sum().item()]

    (result,) = function_of(record(function, [torch.ones(300, 300), torch.ones(1)]), 1)(
        torch.ones(300, 300), torch.ones(1), None
    )
    assert not seen[0].any()
    expected = torch.ones(300, 300) @ LARGE_MATRIX * (LARGE_MATRIX @ LARGE_MATRIX).sum()
    torch.testing.assert_close(result, expected)


def inverse(x, w):
    return [torch.linalg.inv(x @ w)]


def inverse_if_possible(x, w):
    product = x @ w
    try:
        return [torch.linalg.inv(product)]
    except torch.linalg.LinAlgError:
        return [product]


@pytest.mark.parametrize("function", [inverse, inverse_if_possible])
def test_what_refuses_zeros_needs_real_products(function):
    given = torch.eye(300) * 2, torch.eye(300)
    with pytest.raises(ZerosRefused, match="singular"):
        record(function, given)
    captured = record(function, given, is_real=True)
    torch.testing.assert_close(function_of(captured, 1)(*given, None), [torch.eye(300) / 2])


def test_what_depends_on_values_is_not_for_want_of_real_products():
    with pytest.raises(RuntimeError, match="depends on the values of a tensor") as caught:
        record(lambda x, w: [x * (x @ w).sum().item()], [torch.ones(300, 300)] * 2)
    assert not isinstance(caught.value, ZerosRefused)
