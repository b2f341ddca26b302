"""A scheduler of a training model: each weight update inside a call has the scheduler's values."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support.models import Mlp, assert_equal_weights, classified, quiet_options
from torch.optim import lr_scheduler

from popdist_py import poptorch
from popdist_py.poptorch import lamb_and_lars, optim
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

CALLS, UPDATES, ACCUMULATION, REPLICAS = 2, 3, 2, 2
# Our optimiser, the reference on the CPU, and the arguments of both.
OPTIMIZERS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "torch's SGD": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "LAMB": (optim.LAMB, lamb_and_lars.LAMB, {"lr": 0.1}),
    "LARS": (optim.LARS, lamb_and_lars.LARS, {"lr": 50.0}),
}
SCHEDULERS = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.5**n),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 4]),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.StepLR(o, 1)], milestones=[2]
    ),
}


def options(updates=UPDATES):
    found = quiet_options().deviceIterations(updates).replicationFactor(REPLICAS)
    found.Training.gradientAccumulation(ACCUMULATION)
    # Always the same back end, so that weights can be compared bit by bit.
    found.Emulator.replicaExecution("loop")
    return found


def samples(number):
    """Return the samples of weight update ``number``: one for each replica and micro-batch."""
    return classified(REPLICAS * ACCUMULATION, seed=number)


def call_of(first, updates=UPDATES):
    """Return the samples of a call, whose first update has the number ``first``."""
    parts = [samples(first + number) for number in range(updates)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def groups_of(model):
    """Return the first layer, and the second one with half the rate's schedule."""
    return [{"params": model.layers[0].parameters()}, {"params": model.layers[2].parameters()}]


def in_groups(optimizer):
    return lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1 / (1 + n)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_update_of_each_group_has_its_rate(name):
    """The weights are those of torch's loop, and to the bit those of calls of one update."""
    kind, theirs, arguments = OPTIMIZERS[name]
    model = Mlp()
    reference, one_by_one = copy.deepcopy(model), copy.deepcopy(model)
    scaling = {"loss_scaling": 8.0} if issubclass(kind, optim.Optimizer) else {}

    optimizer = kind(groups_of(model), **arguments, **scaling)
    training = poptorch.trainingModel(model, options(), optimizer, in_groups(optimizer))
    for call in range(CALLS):
        training(*call_of(UPDATES * call))

    optimizer = kind(groups_of(one_by_one), **arguments, **scaling)
    scheduler = in_groups(optimizer)
    single = poptorch.trainingModel(one_by_one, options(1), optimizer)
    their_optimizer = theirs(groups_of(reference), **arguments)
    their_scheduler = in_groups(their_optimizer)
    for number in range(UPDATES * CALLS):
        single(*samples(number))
        scheduler.step()
        single.setOptimizer(optimizer)
        their_optimizer.zero_grad()
        reference(*samples(number))[1].backward()
        their_optimizer.step()
        their_scheduler.step()
    assert_equal_weights(model, one_by_one, rtol=0, atol=0)
    assert_equal_weights(model, reference, rtol=1e-4, atol=1e-5)


def test_rates_are_read_back_and_nothing_is_compiled_again():
    model = Mlp()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    training = poptorch.trainingModel(model, options(), optimizer, scheduler)
    training.compile(*call_of(0))
    assert scheduler.get_last_lr() == [1.0]
    compiled = training._compiled
    training(*call_of(0))
    assert scheduler.get_last_lr() == [0.125]  # that of the next update
    assert optimizer.param_groups[0]["lr"] == 0.125
    rates = optimizer.state_dict()["ipu_param"]
    assert {float(value) for name, value in rates.items() if "Learning" in name} == {0.125}
    training.setOptimizer(optimizer)
    training(*call_of(3))
    assert scheduler.get_last_lr() == [0.125]
    training.setOptimizer(optimizer, scheduler=scheduler)
    training(*call_of(6))
    assert scheduler.get_last_lr() == [0.125**2]
    assert training._compiled is compiled
    other = optim.Adam(model.parameters(), lr=1.0)
    training.setOptimizer(other, SCHEDULERS["LambdaLR"](other))
    training(*call_of(9))
    assert other.param_groups[0]["lr"] == 0.125
    assert scheduler.get_last_lr() == [0.125**2]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_checkpoint_goes_on_with_the_rates(tmp_path, name):
    """Also with calls of another length."""
    start = Mlp()

    def made(updates):
        model = copy.deepcopy(start)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(
            model, options(updates), optimizer, SCHEDULERS[name](optimizer)
        )
        return model, training, TrainingCheckpoints(tmp_path, training)

    whole, training, checkpoints = made(2)
    training(*call_of(0, 2))
    checkpoints.save(2)
    training(*call_of(2, 2))
    training(*call_of(4, 2))
    resumed, training, checkpoints = made(4)
    assert checkpoints.resume()[0] == 2
    training(*call_of(2, 4))
    assert_equal_weights(whole, resumed, rtol=0, atol=0)


def test_a_checkpoint_without_a_scheduler_is_resumed_with_one(tmp_path):
    model = Mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(*call_of(0))
    TrainingCheckpoints(tmp_path, training).save(3)
    training.destroy()
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    training = poptorch.trainingModel(model, options(), optimizer, scheduler)
    assert TrainingCheckpoints(tmp_path, training).resume()[0] == 3
    training(*call_of(3))
    assert scheduler.last_epoch == 3


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def nested_plateau(optimizer):
    found = SCHEDULERS["SequentialLR"](optimizer)
    found._schedulers[1] = plateau(optimizer)
    return found


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda _: 0.1,
            "scheduler has the type float: expected a scheduler of torch.optim.lr_scheduler",
        ),
        (
            lambda _: [0.1],
            "scheduler has the type list: expected a scheduler of torch.optim.lr_scheduler",
        ),
        (plateau, r"ReduceLROnPlateau, which needs a metric at each step: .* step\(metric\)"),
        (nested_plateau, "ReduceLROnPlateau, which needs a metric"),
        (
            lambda _: SCHEDULERS["StepLR"](optim.SGD(Mlp().parameters(), lr=0.1)),
            "scheduler is a StepLR of another optimizer than the model's",
        ),
    ],
)
def test_what_cannot_be_stepped_after_each_update_is_refused(make, said):
    model = Mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match=said):
        poptorch.trainingModel(model, options(), optimizer, make(optimizer))
    training = poptorch.trainingModel(model, options(), optimizer)
    with pytest.raises(poptorch.Error, match=said):
        training.setOptimizer(optimizer, make(optimizer))
    training(*call_of(0))  # the model has the optimiser that it had
    with pytest.raises(poptorch.Error, match="inference model does not update weights"):
        poptorch.inferenceModel(model).setOptimizer(optimizer)


def test_a_scheduler_without_its_optimizer_is_refused():
    model = Mlp()
    scheduler = SCHEDULERS["StepLR"](optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="of another optimizer than the model's"):
        poptorch.trainingModel(model, options(), scheduler=scheduler)


def test_a_constant_that_a_scheduler_changes_is_refused():
    model = Mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    training = poptorch.trainingModel(model, options(), optimizer, scheduler)
    with pytest.raises(poptorch.Error, match=r"betas .* constant .* cycle_momentum=False"):
        training(*call_of(0))
