"""Hooks on gradients act as in a program without replicas, whatever runs the replicas."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Mlp, assert_equal_weights, classified, quiet_options

import popdist_py.poptorch as poptorch

REPLICAS = 2


def clamp(gradient):
    return gradient.clamp(-0.01, 0.01)


def clamp_kept(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def drop(parameter):
    parameter.grad = None


HOOKS = {
    "changes": lambda weight: weight.register_hook(clamp),
    "changes afterwards": lambda weight: weight.register_post_accumulate_grad_hook(clamp_kept),
    "drops": lambda weight: weight.register_post_accumulate_grad_hook(drop),
}


def wrapped(model, execution="auto", **options):
    made = quiet_options().replicationFactor(REPLICAS)
    made.Training.gradientAccumulation(2)
    made.Emulator.set(replica_execution=execution, **options)
    # A hook sees nothing of the loss scaling.
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, loss_scaling=128.0)
    return poptorch.trainingModel(model, made, optimizer)


def step_of_reference(model, x, y):
    """Do what a training with 2 replicas and 2 accumulation steps does, one after the other."""
    count = 2 * REPLICAS
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for part, labels in zip(x.chunk(count), y.chunk(count), strict=True):
        model.zero_grad()
        model(part, labels)[1].backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad / count
    with torch.no_grad():
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter -= total


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_the_program_acts_on_each_replicas_gradient(kind, deterministic):
    model = Mlp()
    reference = copy.deepcopy(model)
    for one in (model, reference):
        HOOKS[kind](one.layers[0].weight)
    training = wrapped(model, deterministic_reduction=deterministic)
    for step in range(3):
        batch = classified(8, seed=step)
        training(*batch)
        step_of_reference(reference, *batch)
    assert training._compiled.program.back_end == "loop"
    assert_equal_weights(model, reference)


def test_a_hook_acts_from_when_it_is_given_until_it_is_removed():
    model = Mlp()
    reference = copy.deepcopy(model)
    training = wrapped(model)
    handles = []
    for step in range(3):
        if step == 1:
            handles = [one.layers[0].weight.register_hook(clamp) for one in (model, reference)]
        if step == 2:
            for handle in handles:
                handle.remove()
        batch = classified(8, seed=step)
        training(*batch)
        step_of_reference(reference, *batch)
    assert_equal_weights(model, reference)


class HookedOnce(Mlp):
    """Hooks a gradient in its first forward only."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, y):
        if not self.seen:
            self.seen.append("hooked")
            self.layers[0].weight.register_hook(lambda gradient: self.seen.append(gradient.sum()))
        return super().forward(x, y)


def seen_by_a_parameter():
    model = Mlp()
    seen = []
    model.layers[0].weight.register_hook(lambda gradient: seen.append(gradient))
    return model, seen


def seen_by_a_module():
    model = Mlp()
    seen = []
    model.layers[2].register_full_backward_hook(lambda *gradients: seen.append(gradients))
    return model, seen


def seen_by_a_forward():
    model = HookedOnce()
    return model, model.seen


@pytest.mark.parametrize("make", [seen_by_a_parameter, seen_by_a_module, seen_by_a_forward])
def test_a_hook_that_only_looks_is_called_in_every_run(make):
    model, seen = make()
    training = wrapped(model)
    training(*classified(8))
    before = len(seen)
    training(*classified(8))
    assert len(seen) - before == 2 * REPLICAS
    with pytest.raises(poptorch.Error, match=r"fused.*not possible.*hook"):
        wrapped(make()[0], "fused").compile(*classified(8))
