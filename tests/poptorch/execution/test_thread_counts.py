"""deterministicReduction gives the same bits for every number of torch's threads.

PyTorch divides sums among its threads, so other numbers of threads add in another order. One test
shows that it does, or the others would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.models import WithLoss, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch

THREADS = (1, 2, 3, 4)
SIDE, CLASSES, SAMPLES = 32, 10, 16


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _dense() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 256), nn.GELU(), nn.LayerNorm(256),
        nn.Dropout(0.1), nn.Linear(256, CLASSES),
    )  # fmt: skip


def _recurrent() -> nn.Module:
    return nn.Sequential(
        _Rows(),
        nn.LSTM(96, 32, batch_first=True),
        _First(),
        nn.Flatten(),
        nn.Linear(32 * SIDE, CLASSES),
    )


class _Rows(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0], SIDE, 3 * SIDE)


class _First(nn.Module):
    def forward(self, pair):
        return pair[0]


def _sgd(parameters) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters) -> torch.optim.Optimizer:
    return poptorch.optim.AdamW(parameters, lr=0.01)


def _lamb(parameters) -> torch.optim.Optimizer:
    return poptorch.optim.LAMB(parameters, lr=0.01)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(
    make: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    *,
    deterministic: bool = True,
) -> list[bytes]:
    """Train two steps and infer; return the bytes of losses, weights and answers."""
    torch.manual_seed(0)
    x = torch.randn(2 * SAMPLES, 3, SIDE, SIDE)
    model = make()
    model.to(dtype)
    x, y = x.to(dtype), torch.arange(2 * SAMPLES) % CLASSES
    options = quiet_options().randomSeed(1).replicationFactor(2)
    options.Emulator.deterministicReduction(deterministic)
    options.Emulator.doublePrecision(dtype == torch.float64)
    options.Precision.enableStochasticRounding(dtype == torch.float16)
    with_loss = WithLoss(model, nn.CrossEntropyLoss())
    training = poptorch.trainingModel(with_loss, options, optimizer(with_loss.parameters()))
    found = [tensor for _ in range(2) for tensor in training(x, y)]
    found += training.state_dict().values()
    training.detachFromDevice()
    # Without a seed: the way in which replicas run must not depend on measured times either.
    options = quiet_options().replicationFactor(2)
    options.Emulator.deterministicReduction(deterministic)
    options.Emulator.doublePrecision(dtype == torch.float64)
    inference = poptorch.inferenceModel(model.eval(), options)
    found += [inference(x) for _ in range(2)]
    return [_bytes(tensor) for tensor in found]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


CASES = [
    (_convolutions, _sgd, torch.float32),
    (_convolutions, _lamb, torch.float16),
    (_dense, _adam, torch.float32),
]
MODELS, OPTIMIZERS = (_convolutions, _dense, _recurrent), (_sgd, _adam, _lamb)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Each model with each optimizer in the sweep, with one type of weights; make test-all has all four.
MORE_CASES = [
    pytest.param(
        make, optimizer, dtype, marks=pytest.mark.sweep if k == (i + j) % 4 else pytest.mark.long
    )
    for i, make in enumerate(MODELS)
    for j, optimizer in enumerate(OPTIMIZERS)
    for k, dtype in enumerate(DTYPES)
]


def _check(make, optimizer, dtype) -> None:
    torch.set_num_threads(THREADS[0])
    expected = bits(make, optimizer, dtype)
    for number in THREADS[1:]:
        torch.set_num_threads(number)
        assert bits(make, optimizer, dtype) == expected, f"{number} threads"


@pytest.mark.parametrize(("make", "optimizer", "dtype"), CASES)
def test_bits_do_not_depend_on_the_number_of_threads(make, optimizer, dtype, threads):
    _check(make, optimizer, dtype)


@pytest.mark.parametrize(("make", "optimizer", "dtype"), MORE_CASES)
def test_bits_of_more_models_do_not_either(make, optimizer, dtype, threads):
    _check(make, optimizer, dtype)


def test_without_it_they_do_so_that_the_other_tests_show_something(threads):
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(bits(_dense, _sgd, torch.float32, deterministic=False))
    assert found[0] != found[1]
