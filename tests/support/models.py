"""Small models and helpers that several test modules share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch

torch.set_num_threads(1)


def quiet_options() -> poptorch.Options:
    return poptorch.Options().showCompilationProgressBar(False)


class WithLoss(nn.Module):
    """A model and its loss: returns the output and the loss."""

    def __init__(self, model: nn.Module, loss=None):
        super().__init__()
        self.model = model
        self.loss = loss or nn.MSELoss()

    def forward(self, x, y):
        out = self.model(x)
        return out, self.loss(out, y)


class Mlp(nn.Module):
    def __init__(self, inputs=6, classes=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))

    def forward(self, x, y=None):
        out = self.layers(x)
        return out if y is None else (out, F.cross_entropy(out, y))


def classified(samples: int, inputs: int = 6, classes: int = 4, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=dtype)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def trained(model=None, **options):
    model = model or Mlp()
    return model, poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )


def steps(model, optimizer, count):
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    for step in range(count):
        training(*classified(8, seed=step))
    return training


def reference_steps(model, optimizer, count):
    for step in range(count):
        optimizer.zero_grad()
        model(*classified(8, seed=step))[1].backward()
        optimizer.step()


def assert_equal_weights(ours, theirs, **tolerance):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), **tolerance)


def inside(training=False, tracing_forward=False):
    """Be inside the forward of a wrapped model."""
    return current_forward.entered(
        current_forward.ForwardPhase(training=training, tracing=tracing_forward)
    )


def placement_of(strategy, module, run, *inputs, training=False):
    """Return where everything goes in ``run(*inputs)``, a forward of ``module``."""
    blocks = BlockRecorder(strategy, module, inputs)
    with ForwardWatch(blocks=blocks).following():
        run(*inputs)
    return blocks.placement(training=training)
