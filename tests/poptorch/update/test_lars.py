"""LARS against its formula in NumPy: ratios, exclusions, rates that change, halves, and splits."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import Mlp, classified, quiet_options

from popdist_py import poptorch
from popdist_py.poptorch import optim
from popdist_py.poptorch.update.shared_optimizer import can_share

PROGRAM = Path(__file__).with_name("lars_program.py")
PLAIN = {"lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4, "eeta": 1e-3, "epsilon": 0.0}


def norm(values):
    return np.sqrt(np.sum(values.astype(np.float64) ** 2))


def updated(w, g, v, *, lr, momentum, weight_decay, eeta, epsilon, adapt=True):
    """Return new weights and velocity, as the paper and MLPerf's reference say."""
    trust = 1.0
    if adapt and norm(w) > 0 and norm(g) > 0:
        trust = eeta * norm(w) / (norm(g) + weight_decay * norm(w) + epsilon)
    v = momentum * v + trust * lr * (g + weight_decay * w)
    return w - v, v


def groups_of(model):
    """Matrices adapt their rates; biases do not, and do not decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim == 1], "adapt": False, "weight_decay": 0.0},
    ]


def gradients(model, step):
    model.zero_grad()
    model(*classified(8, dtype=torch.float64, seed=step))[1].backward()
    return [p.grad.numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1, "eeta": 0.02}, {"momentum": 0.0, "epsilon": 0.5, "eeta": 0.1}],
    ids=["default", "decay", "epsilon"],
)
def test_device_and_cpu_follow_the_formula(settings):
    torch.manual_seed(0)
    model = Mlp().double()
    by_hand, on_cpu = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = optim.LARS(groups_of(model), lr=0.3, loss_scaling=128.0, **settings)
    reference = optim.LARS(groups_of(on_cpu), lr=0.3, **settings)
    options = quiet_options()
    options.Emulator.doublePrecision(True)
    training = poptorch.trainingModel(model, options, optimizer)
    velocities = [np.zeros(p.shape) for p in by_hand.parameters()]
    for step, rate in enumerate((0.3, 0.3, 2.0, 0.0, 1e-3)):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = rate
        training.setOptimizer(optimizer)
        training(*classified(8, dtype=torch.float64, seed=step))
        gradients(on_cpu, step)
        reference.step()
        for index, (p, g) in enumerate(
            zip(by_hand.parameters(), gradients(by_hand, step), strict=True)
        ):
            group = {**PLAIN, **settings, "lr": rate}
            if p.ndim == 1:
                group.update(adapt=False, weight_decay=0.0)
            w, velocities[index] = updated(p.detach().numpy(), g, velocities[index], **group)
            p.data = torch.from_numpy(w)
    for found, cpu, expected in zip(
        model.parameters(), on_cpu.parameters(), by_hand.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(cpu, expected, rtol=1e-12, atol=1e-13)
    for name, velocity in zip(dict(model.named_parameters()), velocities, strict=True):
        kept = optimizer.state_dict()["ipu_state"]
        if settings.get("momentum") == 0:
            assert kept == {}
        else:
            np.testing.assert_allclose(kept[f"Accl1___{name}"], velocity, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("is_zero", ["weights", "gradient", "both", "neither"])
def test_what_is_zero_keeps_the_whole_rate(is_zero):
    weights, gradient = np.array([3.0, -4.0]), np.array([0.6, 0.8])
    if is_zero in ("weights", "both"):
        weights[:] = 0
    if is_zero in ("gradient", "both"):
        gradient[:] = 0
    parameter = torch.nn.Parameter(torch.tensor(weights))
    optimizer = optim.LARS([parameter], lr=0.5, weight_decay=0.1, eeta=0.01)
    velocity = np.zeros(2)
    for _ in range(2):
        parameter.grad = torch.tensor(gradient)
        settings = {**PLAIN, "lr": 0.5, "weight_decay": 0.1, "eeta": 0.01}
        weights, velocity = updated(weights, gradient, velocity, **settings)
        optimizer.step()
        np.testing.assert_allclose(parameter.detach(), weights, rtol=1e-14, atol=0)


def test_the_momentum_may_begin_later():
    model = Mlp()
    optimizer = optim.LARS(model.parameters(), lr=0.1, momentum=0.0)
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    training(*classified(8))
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    training.setOptimizer(optimizer)
    training(*classified(8))
    assert optimizer.state_dict()["ipu_state"]["Accl1___layers.0.weight"].count_nonzero()


def test_half_weights_are_updated_in_single_precision():
    class Product(torch.nn.Module):
        """The gradient of the weights is the input, whatever they are."""

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 4.0]).half())

        def forward(self, x):
            return poptorch.identity_loss((self.w * x).sum(), reduction="none")

    model = Product()
    optimizer = optim.LARS(
        model.parameters(), lr=0.3, weight_decay=0.1, eeta=0.2, loss_scaling=16.0
    )
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    x = torch.tensor([0.5, 0.25, -1.0, 2.0]).half()
    weights, velocity = model.w.detach().numpy().copy(), np.zeros(4)
    settings = {**PLAIN, "weight_decay": 0.1, "eeta": 0.2}
    for _ in range(3):
        training(x)
        single, velocity = updated(
            weights.astype(np.float64), x.numpy().astype(np.float64), velocity, **settings
        )
        weights = single.astype(np.float16)
    assert model.w.dtype == torch.float16
    assert np.array_equal(model.w.detach().numpy(), weights)
    kept = optimizer.state_dict()["ipu_state"]["Accl1___w"]
    np.testing.assert_allclose(kept, velocity, rtol=1e-6)


def test_gradients_are_clipped_before_their_norms_are_taken():
    torch.manual_seed(0)
    model = Mlp()
    reference = copy.deepcopy(model)
    ours = optim.LARS(model.parameters(), lr=0.3, weight_decay=0.1, eeta=0.1, max_grad_norm=0.01)
    theirs = optim.LARS(reference.parameters(), lr=0.3, weight_decay=0.1, eeta=0.1)
    training = poptorch.trainingModel(model, quiet_options(), ours)
    for step in range(3):
        training(*classified(8, seed=step))
        reference.zero_grad()
        reference(*classified(8, seed=step))[1].backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        theirs.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_instances_do_not_share_an_update_that_needs_whole_tensors():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    host = SimpleNamespace(host_memory=object())
    assert can_share(optim.SGD(parameters, lr=0.1), parameters, host)
    assert not can_share(optim.LARS(parameters, lr=0.1), parameters, host)


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "eeta", "epsilon"])
def test_numbers_below_zero_are_refused(name):
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(
        ValueError, match=rf"argument {name} of the LARS optimizer is -1\.0: expected 0 or more$"
    ):
        optim.LARS(parameters, **{"lr": 0.1, name: -1.0})
    with pytest.raises(
        ValueError, match=rf"argument {name} of the LARS optimizer is -1\.0: expected 0 or more$"
    ):
        optim.LARS([{"params": parameters, name: -1.0}], lr=0.1)


@pytest.mark.mpi
@pytest.mark.sweep
@pytest.mark.timeout(150)
@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_split_trains_the_same_weights_bit_for_bit(poprun, warm, tmp_path, instances):
    program = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
    done = poprun(
        "--num-instances", instances, "--num-replicas", program.REPLICAS, "--oversubscribe",
        *warm, PROGRAM, tmp_path, timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    expected = program.train(quiet_options().replicationFactor(program.REPLICAS), first=0)
    for index in range(instances):
        found = torch.load(tmp_path / f"{index}.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
