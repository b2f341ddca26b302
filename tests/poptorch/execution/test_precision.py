"""Number formats: half, mixed, doubles, stochastic rounding, and traps."""

from __future__ import annotations

import pytest
import torch
from support.models import Mlp, WithLoss, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


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


class Halved(nn.Module):
    """A layer with float weights, on activations that only its forward makes half."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        x = x.half()
        inputs = [x, x, x] if isinstance(self.layer, nn.MultiheadAttention) else [x]
        out = self.layer(*inputs)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(8, 3),
        nn.Conv1d(5, 2, 3),
        nn.MultiheadAttention(8, 2),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        nn.LSTM(8, 3),
        nn.GRU(8, 3),
        nn.RNN(8, 3),
        nn.LayerNorm(8),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_float_weights_take_half_activations(layer):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    inference = poptorch.inferenceModel(Halved(layer), quiet_options())
    out = inference(x)
    assert out.dtype == torch.float16
    assert inference._compiled.executable.mixed_precision
    inputs = [x, x, x] if isinstance(layer, nn.MultiheadAttention) else [x]
    expected = layer(*inputs)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(out.float(), expected.detach(), rtol=5e-3, atol=5e-3)


def test_functions_with_float_weights_take_half_activations():
    weight = torch.randn(8, 3)

    def products(x):
        half = x.half()
        return (
            half @ weight,
            torch.tensordot(half, weight, dims=([1], [0])),
            torch.inner(half, weight.T),
            torch.linalg.multi_dot([half, weight]),
        )

    x = torch.randn(5, 8)
    for out in poptorch.inferenceModel(products, quiet_options())(x):
        assert out.dtype == torch.float16
        torch.testing.assert_close(out.float(), x @ weight, rtol=5e-3, atol=2e-2)


def test_models_without_half_products_run_as_they_are():
    inference = poptorch.inferenceModel(nn.Linear(4, 2), quiet_options())
    inference(torch.randn(1, 4))
    assert not inference._compiled.executable.mixed_precision
    with pytest.raises(ValueError, match="does not match weight dtype"):
        nn.LSTM(8, 3)(torch.randn(2, 1, 8).half())


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


@pytest.mark.parametrize("execution", ["loop", "fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norms_of_half_activations_keep_statistics_in_their_own_format(execution, dtype):
    torch.manual_seed(0)
    model = WithLoss(nn.BatchNorm1d(3).half())
    for name in ("running_mean", "running_var"):
        setattr(model.model, name, getattr(model.model, name).to(dtype))
    options = quiet_options().replicationFactor(2)
    options.Emulator.replicaExecution(execution)
    training = poptorch.trainingModel(model, options)
    x = torch.randn(8, 3).half() + 1
    training(x, torch.zeros(8, 3).half())
    host = nn.BatchNorm1d(3)
    host(x[:4].float())
    for name in ("running_mean", "running_var"):
        own = getattr(model.model, name)
        assert own.dtype == dtype
        torch.testing.assert_close(own, getattr(host, name).to(dtype), rtol=2e-3, atol=1e-4)


class Mixed(nn.Module):
    """Convolutions with batch norms, attention, and layers that share what they read."""

    def __init__(self):
        super().__init__()
        self.images = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 8, 2, stride=2), nn.Conv2d(4, 8, 2, stride=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x, y):
        x = torch.relu_(self.norm(self.images(x)))
        x = (self.left(x) + self.right(x)).flatten(2).transpose(1, 2)
        x, _ = self.attention(x, x, x, need_weights=False)
        out = self.last(x.mean(1))
        return out, nn.functional.cross_entropy(out, y)


def train_in_half(execution, replicas):
    torch.manual_seed(0)
    model = Mixed().half()
    options = quiet_options().replicationFactor(replicas)
    options.Training.gradientAccumulation(2)
    options.Emulator.set(replica_execution=execution)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, options, optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4 * replicas, 1, 6, 6, generator=generator).half()
        training(x, torch.arange(4 * replicas) % 3)
    assert training._compiled.program.back_end == execution
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_captured_graph_rounds_halves_as_the_loop_does():
    for replicas in (1, 2):
        expected = train_in_half("loop", replicas)
        for name, value in train_in_half("graph", replicas).items():
            assert torch.equal(value, expected[name]), name


def test_all_replicas_at_once_round_halves_as_one_batch():
    expected = train_in_half("loop", 2)
    for name, value in train_in_half("fused graph", 2).items():
        torch.testing.assert_close(value, expected[name], rtol=2e-3, atol=2e-3, msg=name)
