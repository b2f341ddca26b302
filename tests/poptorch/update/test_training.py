"""The end of an accumulation window: what comes before what, and with which scale."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from popdist_py import poptorch
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer
from popdist_py.poptorch.update.gradients import SharedGradients, TreeGradients
from popdist_py.poptorch.update.loss_scaling import AutomaticLossScaling
from popdist_py.poptorch.update.training import Training


class Others:
    """A communicator whose other instance has the same gradients."""

    num_instances = 1
    spans_hosts = False
    host_memory = None

    def __init__(self, log=None):
        self.log = log if log is not None else []

    def all_reduce(self, array, operation="sum", name=""):
        self.log.append(name)
        array *= 2

    def gradient_buffer(self, size):
        return np.zeros(size, dtype=np.uint8)


def recorder(log, **values):
    """Return an object that notes which of its methods are called, with what."""

    def noting(name, answer):
        def method(*args):
            log.append((name, *args))
            return answer

        return method

    return SimpleNamespace(
        **{name: noting(name, value[0]) if isinstance(value, list) else value
           for name, value in values.items()}
    )  # fmt: skip


def test_a_step_reduces_once_and_then_updates():
    log = []
    gradients = recorder(log, all_reduce=[None])
    optimizer = recorder(
        log, step=[None], loss_scaling=4.0, updates_each_alone=False, parameters=()
    )
    scaler = recorder(log, overflows=[True], adapt=[None], factor=0.5)
    training = Training(
        optimizer=optimizer,
        gradients=gradients,
        gradient_scale=0.25,
        scaler=scaler,
        rounding=recorder(log, seed=[None]).seed,
    )
    assert training.scale == 0.5
    training.step(7)
    assert log == [
        ("seed", 7), ("overflows", gradients), ("all_reduce",), ("step", 2.0),
        ("adapt", True, 2.0),
    ]  # fmt: skip
    assert optimizer.loss_scaling == 4.0


def test_without_a_scaler_the_scale_is_the_optimizers_own():
    log = []
    training = Training(
        optimizer=recorder(
            log, step=[None], loss_scaling=4.0, updates_each_alone=True, parameters=()
        ),
        gradients=recorder(log, all_reduce=[None], in_parts=[None]),
        gradient_scale=0.25,
    )
    assert training.scale == 1.0
    training.step(0)
    assert log == [("in_parts",), ("all_reduce",), ("step", 4.0)]


@pytest.mark.parametrize(
    "kind",
    [poptorch.optim.SGD, poptorch.optim.AdamW, poptorch.optim.LAMB, poptorch.optim.LARS],
)
def test_updates_in_parts_are_those_at_once(kind):
    def updated(step):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in (3, 4, 5)]
        device = DeviceOptimizer(
            kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], lr=0.1),
            lambda parameter: [parameter],
            {str(index): parameter for index, parameter in enumerate(parameters)},
        )
        assert device.updates_each_alone
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            step(device, parameters)
            assert all(parameter.grad is not None for parameter in parameters)
        return torch.cat([parameter.detach() for parameter in parameters])

    with torch.no_grad():
        at_once = updated(lambda device, _: device.step(2.0))
        in_parts = updated(
            lambda device, own: device.step_in_parts(2.0, [[own[2], own[0]], [own[1]]])
        )
    assert torch.equal(at_once, in_parts)


def gradients_of(values, kind):
    """Return the gradients of one parameter on as many replicas as there are values."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    if kind is TreeGradients:
        gradients = TreeGradients([parameter], Others(), len(values))
    else:
        gradients = SharedGradients([parameter], Others())
    gradients.zero()
    for replica, value in enumerate(values):
        gradients.select_replica(replica)
        (parameter * value).sum().backward()
        gradients.collect()
    return gradients


@pytest.mark.parametrize(
    ("kind", "values", "sums"),
    [(SharedGradients, [1.0, 2.0], [3.0]), (TreeGradients, [1.0, 2.0], [1.0, 2.0])],
)
def test_local_sums_can_be_changed_in_place(kind, values, sums):
    gradients = gradients_of(values, kind)
    seen = []
    for (local,) in gradients.local_sums():
        seen.append(local[0].item())
        local.mul_(10)
    assert seen == sums
    assert [local[0].item() for (local,) in gradients.local_sums()] == [10 * s for s in sums]


@pytest.mark.parametrize("kind", [SharedGradients, TreeGradients])
@pytest.mark.parametrize(("largest", "factor"), [(1.0, 2.0), (60000.0, 0.5), (float("nan"), 0.5)])
def test_the_scaler_looks_at_every_replica_and_adapts(kind, largest, factor):
    others = Others()
    scaler = AutomaticLossScaling(others)
    too_large = scaler.overflows(gradients_of([0.0, largest], kind))
    scaler.adapt(too_large, 1.0)
    assert scaler.factor == factor
    assert others.log == ["gradients near half's largest value"]


def test_the_scaler_looks_at_the_end_of_a_period_only():
    others = Others()
    scaler = AutomaticLossScaling(others, update_period=3)
    gradients = gradients_of([1.0], SharedGradients)
    factors = []
    for _ in range(6):
        scaler.adapt(scaler.overflows(gradients), scaler.factor)
        factors.append(scaler.factor)
    assert factors == [1, 1, 2, 2, 2, 4]
    assert len(others.log) == 2


@pytest.mark.parametrize(("own", "too_large"), [(2.0**15, False), (2.0**-15, True)])
def test_the_scale_stays_in_the_range_of_half(own, too_large):
    scaler = AutomaticLossScaling(Others())
    scaler.adapt(too_large, own)
    assert scaler.factor == 1.0
