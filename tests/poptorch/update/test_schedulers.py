"""torch's learning-rate schedulers over the optimisers of a training model: torch's numbers, and
no warning from either side."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.models import Mlp, assert_equal_weights, classified, quiet_options
from torch.optim import lr_scheduler

from popdist_py import poptorch
from popdist_py.poptorch import optim

SCHEDULERS = {
    "LambdaLR": lambda o, **k: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch, **k),
    "StepLR": lambda o, **k: lr_scheduler.StepLR(o, 2, **k),
    "CosineAnnealingLR": lambda o, **k: lr_scheduler.CosineAnnealingLR(o, 10, **k),
    "OneCycleLR": lambda o, **k: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20, **k),
    "CyclicLR": lambda o, **k: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, **k),
    "LinearLR": lambda o, **k: lr_scheduler.LinearLR(o, total_iters=3, **k),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.StepLR(o, 1)], milestones=[2]
    ),
}
RESUMABLE = [name for name in SCHEDULERS if name not in ("ReduceLROnPlateau", "SequentialLR")]
# Momentum and betas are given, so that they may change: OneCycleLR and CyclicLR change them too.
OPTIMIZERS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99)}),
    "torch's Adam": (torch.optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
}
# OneCycleLR changes the most: rate, and momentum or betas.
SCHEDULES = [
    *(("SGD", name, "after the model") for name in SCHEDULERS),
    ("SGD", "OneCycleLR", "before the model"),
    ("Adam", "OneCycleLR", "before the model"),
    ("torch's Adam", "OneCycleLR", "after the model"),
]


@pytest.fixture(autouse=True)
def no_warning(caplog):
    with warnings.catch_warnings(action="error"):
        yield
    assert not caplog.get_records("call")


def stepped(scheduler):
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def train(training, optimizer, scheduler, reference, their_optimizer, their_scheduler, seeds):
    """Train a wrapped model and torch's alike, with one step of their schedulers after each."""
    for seed in seeds:
        training(*classified(8, seed=seed))
        their_optimizer.zero_grad()
        reference(*classified(8, seed=seed))[1].backward()
        their_optimizer.step()
        stepped(scheduler)
        stepped(their_scheduler)
        training.setOptimizer(optimizer)


@pytest.mark.parametrize(("optimizer", "name", "when"), SCHEDULES)
def test_a_schedule_is_torchs(optimizer, name, when):
    kind, theirs, arguments = OPTIMIZERS[optimizer]
    model = Mlp()
    reference = copy.deepcopy(model)
    ours, theirs = (
        kind(model.parameters(), **arguments),
        theirs(reference.parameters(), **arguments),
    )
    make = SCHEDULERS[name]
    early = make(ours) if when == "before the model" else None
    training = poptorch.trainingModel(model, quiet_options(), ours)
    train(training, ours, early or make(ours), reference, theirs, make(theirs), range(5))
    assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_schedule_goes_on_where_it_ended(name):
    """What was saved after six steps goes on with last_epoch=5, in a new program."""
    kind, theirs, arguments = OPTIMIZERS["SGD"]
    make = SCHEDULERS[name]
    model = Mlp()
    first, reference = copy.deepcopy(model), copy.deepcopy(model)
    their_optimizer = theirs(reference.parameters(), **arguments)
    their_scheduler = make(their_optimizer)

    ours = kind(first.parameters(), **arguments)
    training = poptorch.trainingModel(first, quiet_options(), ours)
    pair = (reference, their_optimizer, their_scheduler)
    scheduler = make(ours)
    train(training, ours, scheduler, *pair, range(5))
    saved = copy.deepcopy(training.state_dict()), copy.deepcopy(ours.state_dict())
    training.destroy()

    model.load_state_dict(saved[0])
    ours = kind(model.parameters(), **arguments)
    ours.load_state_dict(saved[1])
    resumed = make(ours, last_epoch=4)
    resumed.load_state_dict(scheduler.state_dict())
    for group, theirs in zip(ours.param_groups, their_optimizer.param_groups, strict=True):
        group["lr"] = theirs["lr"]
    training = poptorch.trainingModel(model, quiet_options(), ours)
    train(training, ours, resumed, *pair, range(5, 8))
    assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (optim.Adam, r"pass betas to the constructor of the optimizer, or call .*'betas'\)"),
        (torch.optim.Adam, r"use poptorch\.optim\.Adam and pass betas to its constructor"),
    ],
)
def test_a_schedule_of_a_constant_says_how_to_vary_it(make, advice):
    model = Mlp()
    optimizer = make(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    training.compile(*classified(8))
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    scheduler.step()
    with pytest.raises(poptorch.Error, match=f"{advice}.*cycle_momentum=False"):
        training.setOptimizer(optimizer)
