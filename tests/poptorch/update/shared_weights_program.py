"""Checks of instances that have the weights together, by assertions.

test_shared_weights.py runs them in instances of one host.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import nn

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.update.shared_optimizer import SharedOptimizer

SETTINGS = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 0.05, "momentum": 0.5}],
    "Adam": [{"lr": 0.01}],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1}],
    "RMSprop": [{"lr": 0.01, "centered": True, "momentum": 0.5}],
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.body(x)
        return scores, self.loss(scores, y)


def data(steps):
    generator = torch.Generator().manual_seed(5)
    size = 6 * popdist_py.getNumInstances()
    x = torch.randn(steps, size, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (steps, size), generator=generator)


def groups(net, settings):
    """The first layer with the last settings, the rest with the first."""
    return [
        {"params": list(net.body[2].parameters()), **settings[0]},
        {"params": list(net.body[0].parameters()), **settings[-1]},
    ]


def wrapped(net, optimizer):
    options = poptorch.DistributedOptions()
    options.Emulator.doublePrecision(True)
    return poptorch.trainingModel(net, options, optimizer=optimizer)


def own(batch):
    parts = batch.view(popdist_py.getNumInstances(), -1, *batch.shape[1:])
    return parts[popdist_py.getInstanceIndex()]


def train(model, xs, ys):
    for x, y in zip(xs, ys, strict=True):
        model(own(x), own(y))


def shares(model):
    return isinstance(model._compiled.program.training.optimizer, SharedOptimizer)


def close(found, expected, tolerance=1e-10):
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(found, expected, strict=True)
    )


def optimizer_for(kind, settings, net, **more):
    return getattr(poptorch.optim, kind)(groups(net, settings), **settings[0], **more)


def check_optimizers():
    """Every optimiser ends where torch's ends, on the whole batch in one process."""
    xs, ys = data(6)
    for kind, settings in SETTINGS.items():
        plain, net = Net().double(), Net().double()
        reference = getattr(torch.optim, kind)(groups(plain, settings), **settings[0])
        model = wrapped(net, optimizer_for(kind, settings, net, loss_scaling=8.0))
        for x, y in zip(xs, ys, strict=True):
            reference.zero_grad()
            plain(x, y)[1].backward()
            reference.step()
        train(model, xs, ys)
        assert shares(model)
        model.copyWeightsToHost()
        assert close(net.parameters(), plain.parameters()), kind


def check_clipping():
    """The norm is that of all gradients, not of a slice."""
    xs, ys = data(4)
    plain, net = Net().double(), Net().double()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    model = wrapped(
        net, poptorch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3, max_grad_norm=0.01)
    )
    for x, y in zip(xs, ys, strict=True):
        reference.zero_grad()
        plain(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        reference.step()
    train(model, xs, ys)
    assert shares(model)
    model.copyWeightsToHost()
    assert close(net.parameters(), plain.parameters(), 1e-6)


def check_state_moves():
    """Weights and state that a program takes out and puts in again continue the same training."""
    xs, ys = data(6)
    through, again = Net().double(), Net().double()
    whole = wrapped(through, optimizer_for("Adam", SETTINGS["Adam"], through))
    train(whole, xs, ys)
    whole.copyWeightsToHost()
    first = optimizer_for("Adam", SETTINGS["Adam"], again)
    model = wrapped(again, first)
    train(model, xs[:3], ys[:3])
    state = first.state_dict()
    assert all(torch.count_nonzero(value) for value in state["ipu_state"].values() if value.dim())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = Net().double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = optimizer_for("Adam", SETTINGS["Adam"], other)
    later = wrapped(other, second)
    train(later, xs[:1], ys[:1])
    later.load_state_dict(weights)
    second.load_state_dict(state)
    for name, value in second.state_dict()["ipu_state"].items():
        assert torch.equal(value, state["ipu_state"][name]), name
    train(later, xs[3:], ys[3:])
    later.copyWeightsToHost()
    assert close(other.parameters(), through.parameters())


def changed(state):
    """Return a state: the first layer has twice as large entries, the last bias has none."""
    return {
        entry: {
            name: 2 * value if "body.0" in name and not name.startswith("Step") else value
            for name, value in state[entry].items()
            if "body.2.bias" not in name
        }
        for entry in ("ipu_state", "ipu_param")
    }


def check_changed_state():
    """Rates and state that a program changed are used as on instances with own weights."""
    xs, ys = data(3)
    for kind, more in {"SGD": {}, "Adam": {}, "RMSprop": {"use_tf_variant": True}}.items():
        ends = []
        for value in ("1", "0"):
            os.environ["POPDIST_SHARED_WEIGHTS"] = value
            net = Net().double()
            optimizer = optimizer_for(kind, SETTINGS[kind], net, **more)
            model = wrapped(net, optimizer)
            model.compile(own(xs[0]), own(ys[0]))
            begun = optimizer.state_dict()["ipu_state"]
            train(model, xs[:1], ys[:1])
            state = optimizer.state_dict()
            loaded = changed(state)
            optimizer.load_state_dict({**state, **loaded})
            for entry, tensors in loaded.items():
                read = optimizer.state_dict()[entry]
                assert list(read) == list(tensors)
                assert all(torch.equal(read[name], tensors[name]) for name in read)
            train(model, xs[1:], ys[1:])
            assert shares(model) == (value == "1")
            model.copyWeightsToHost()
            state = optimizer.state_dict()
            entries = (begun, state["ipu_state"], state["ipu_param"])
            ends.append([*net.parameters(), *(v for entry in entries for v in entry.values())])
        del os.environ["POPDIST_SHARED_WEIGHTS"]
        assert close(*ends), kind


def check_loading_is_private_until_the_next_step():
    """What one instance loads early does not show in another that has not loaded yet."""
    xs, ys = data(3)
    net = Net().double()
    model = wrapped(net, poptorch.optim.SGD(net.parameters(), lr=0.1))
    train(model, xs[:2], ys[:2])
    for turn in range(popdist_py.getNumInstances()):
        popdist_py.barrier()
        if turn == popdist_py.getInstanceIndex():
            model.copyWeightsToHost()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.5)
            model.copyWeightsToDevice()
    halved = [parameter.detach().clone() for parameter in net.parameters()]
    for other in popdist_py.all_gather(torch.cat([p.flatten() for p in halved])):
        assert torch.equal(other, torch.cat([p.flatten() for p in halved]))
    train(model, xs[2:], ys[2:])
    model.copyWeightsToHost()
    plain = Net().double()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), halved, strict=True):
            parameter.copy_(value)
    plain(xs[2], ys[2])[1].backward()
    expected = [parameter - 0.1 * parameter.grad for parameter in plain.parameters()]
    assert close(net.parameters(), expected)


def check_another_optimiser():
    """The weights stay where they are, whichever optimiser comes next."""
    xs, ys = data(3)
    net, plain = Net().double(), Net().double()
    model = wrapped(net, poptorch.optim.SGD(net.parameters(), lr=0.1))
    shared = []
    kinds = (None, poptorch.optim.LAMB, poptorch.optim.SGD)
    for kind, x, y in zip(kinds, xs, ys, strict=True):
        if kind is not None:
            lr = 0.1 if kind is poptorch.optim.SGD else 0.0
            model.setOptimizer(kind(net.parameters(), lr=lr))
        train(model, x[None], y[None])
        shared.append(shares(model))
        if kind is not poptorch.optim.LAMB:
            gradients = torch.autograd.grad(plain(x, y)[1], list(plain.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
    assert shared == [True, False, True]
    model.copyWeightsToHost()
    assert close(net.parameters(), plain.parameters())


def check_a_forward_that_changes_weights():
    """Each instance changes its own copy: nobody may change the weights of all."""

    class Shrinking(Net):
        def forward(self, x, y):
            self.body[0].weight.data.mul_(0.5)
            return super().forward(x, y)

    xs, ys = data(1)
    net = Shrinking().double()
    before = net.body[0].weight.detach().clone()
    model = wrapped(net, poptorch.optim.SGD(net.parameters(), lr=0.0))
    model.compile(own(xs[0]), own(ys[0]))
    assert not shares(model)
    model.copyWeightsToHost()
    start = net.body[0].weight.detach().clone()
    train(model, xs, ys)
    model.copyWeightsToHost()
    assert torch.equal(net.body[0].weight, 0.5 * start)
    assert torch.count_nonzero(before)


def check_the_variable_keeps_weights_apart():
    """POPDIST_SHARED_WEIGHTS=0: the same training, every instance with weights of its own."""
    xs, ys = data(4)
    ends = []
    for value in ("1", "0"):
        os.environ["POPDIST_SHARED_WEIGHTS"] = value
        net = Net().double()
        model = wrapped(net, optimizer_for("Adam", SETTINGS["Adam"], net))
        train(model, xs, ys)
        assert shares(model) == (value == "1")
        model.copyWeightsToHost()
        ends.append(list(net.parameters()))
    del os.environ["POPDIST_SHARED_WEIGHTS"]
    assert close(*ends)


def check_fewer_elements_than_slices():
    """Instances without a slice train too."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return poptorch.identity_loss((self.weight * x).sum(), "sum")

    net = Tiny()
    optimizer = poptorch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.0, max_grad_norm=1.0)
    model = wrapped(net, optimizer)
    for _ in range(2):
        model(torch.full((1, 3), float(popdist_py.getInstanceIndex())))
    assert shares(model)
    model.copyWeightsToHost()
    assert np.allclose(net.weight.detach(), 0.8, atol=1e-3), net.weight
    (step,) = (v for k, v in optimizer.state_dict()["ipu_state"].items() if k.startswith("Step"))
    assert float(step) == 2
