"""Functions that make unusual models: most of them can be estimated, and some cannot."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from popdist_py import poptorch


class Computing(nn.Module):
    """A model with one layer, whose forward pass is a given function."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x):
        return self.compute(self.fc, x)


def computing(compute):
    return lambda: Computing(compute)


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def on_meta(make):
    def factory():
        with torch.device("meta"):
            return make()

    return factory


# -- models that can be estimated -----------------------------------------------------------------

without_parameters = nn.ReLU
no_operation = nn.Identity
meta = on_meta(layers)
meta_norm_first = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
bfloat16 = lambda: layers().bfloat16()  # noqa: E731
float64 = lambda: layers().double()  # noqa: E731
float16 = lambda: layers().half()  # noqa: E731
data_parallel = lambda: nn.DataParallel(layers())  # noqa: E731
symbolic = lambda: torch.fx.symbolic_trace(layers())  # noqa: E731
lazy = lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4))  # noqa: E731
scripted_part = lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(layers()))  # noqa: E731
nested = lambda: nn.Sequential(nn.Linear(4, 4), layers())  # noqa: E731
dict_output = computing(lambda fc, x: {"logits": fc(x), "hidden": x})
vectorised = computing(lambda fc, x: torch.func.vmap(fc)(x))
differentiated = computing(lambda fc, x: torch.func.grad(lambda v: fc(v).sum())(x))
functional = computing(
    lambda fc, x: torch.func.functional_call(fc, dict(fc.named_parameters()), (x,))
)
changing_input = computing(lambda fc, x: fc(x.add_(1)))
drawing = computing(lambda fc, x: fc(x) + torch.randn_like(x))
eight_bits = computing(lambda fc, x: fc(x.to(torch.float8_e4m3fn).float()))
detached = computing(lambda fc, x: fc(x).detach())
huge_result = computing(lambda fc, x: fc(x) + fc(x).new_zeros(2**40).sum())


def printing():
    def compute(fc, x):
        print("text of the forward")
        return fc(x)

    print("text of the factory")
    return Computing(compute)


def compiled():
    return torch.compile(layers())


def compiled_part():
    return Computing(torch.compile(lambda fc, x: fc(x).relu()))


def with_autocast():
    def compute(fc, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fc(x)

    return Computing(compute)


def hooked():
    model = layers()
    model[0].register_forward_hook(lambda *made: made[-1] * 2)
    model[2].register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    model.register_forward_hook(lambda *made: made[-1] * 2)
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


an_instance = layers()


def exported():
    return torch.export.export(layers(), (torch.zeros(2, 4),)).module()


def with_none():
    model = layers()
    model.register_buffer("nothing", None)
    model.register_parameter("nor_this", None)
    return model


def with_lock():
    model = layers()
    model.lock, model.file = threading.Lock(), sys.stdin
    return model


def with_odd_names():
    model = nn.Sequential()
    for name in ("two words", "ünï", "a:b"):
        model.add_module(name, nn.Linear(4, 4))
    return model


class Twice(nn.Module):
    """A model with three layers that runs the first, the second and again the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.first(self.between(self.first(x)))


# -- models and factories that cannot -------------------------------------------------------------


def interrupted():
    raise KeyboardInterrupt


@dataclass
class Output:
    logits: torch.Tensor


class KeywordOnly(nn.Module):
    def forward(self, *, x):
        return x


def _lacking_key(fc, x):
    return fc(x) + {}["gone"]


def _asserting(fc, x):
    assert x.shape[1] == 5
    return fc(x)


lacking_key = computing(_lacking_key)
asserting = computing(_asserting)
leaving = computing(lambda *_: sys.exit(0))
interrupting = computing(lambda *_: interrupted())
fourier = computing(lambda fc, x: torch.fft.fft(fc(x)).abs())
complex_view = computing(
    lambda fc, x: torch.view_as_real(torch.view_as_complex(fc(x).view(-1, 2, 2)) * 1j).flatten(1)
)
branching = computing(lambda fc, x: fc(x) if x.sum() > 0 else x)
masking = computing(lambda fc, x: fc(x)[x.sum(1) > 0])
unique = computing(lambda fc, x: torch.unique(fc(x)))
listing = computing(lambda fc, x: torch.tensor(fc(x).tolist()))
as_array = computing(lambda fc, x: torch.from_numpy(fc(x).detach().numpy()))
sparse = computing(lambda fc, x: torch.sparse.mm(torch.eye(4).to_sparse(), fc(x)))
overflowing = computing(lambda fc, x: fc(x) + fc(x).new_zeros((2**40, 2**40)).sum())
truth = computing(lambda fc, x: fc(x) > 0)
no_tensor = computing(lambda *_: "logits")
own_class = computing(lambda fc, x: Output(fc(x)))
number_output = computing(lambda fc, x: fc(x).sum())
odd_width = computing(lambda fc, x: linear(x, fc.weight[:, :3]))
norm = lambda: nn.BatchNorm1d(4)  # noqa: E731
a_class = lambda: nn.Linear  # noqa: E731
a_list = lambda: [layers(), torch.zeros(1, 4)]  # noqa: E731
three = lambda: (layers(), torch.zeros(1, 4), 3)  # noqa: E731
nothing = lambda: None  # noqa: E731
scripted = lambda: torch.jit.script(layers())  # noqa: E731
traced = lambda: torch.jit.trace(layers(), torch.zeros(1, 4))  # noqa: E731
with_options = lambda: (layers(), poptorch.Options())  # noqa: E731
wrapped = lambda: poptorch.inferenceModel(layers())  # noqa: E731
too_large = lambda: nn.Linear(2**30, 2**30)  # noqa: E731


def quantized():
    return nn.Sequential(torch.ao.nn.quantized.ReLU6())
