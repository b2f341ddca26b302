"""States of optimisers that a program changes before it loads them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from support.models import Mlp, assert_equal_weights, classified, quiet_options, steps

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import optim
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

KINDS = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "loss_scaling": 4.0}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.LAMB, {}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (optim.RMSprop, {"use_tf_variant": True}),
    (optim.LARS, {"eeta": 0.1}),
]
NAME = "layers.2.weight"


def made(kind, arguments, model, lr=0.01):
    """Two groups, of one layer each."""
    layers = (model.layers[0], model.layers[2])
    groups = [{"params": list(layer.parameters()), "lr": lr} for layer in layers]
    return kind(groups, lr=lr, **arguments)


def wrapped(model, optimizer):
    options = quiet_options()
    options.Emulator.replicaExecution("loop")
    return poptorch.trainingModel(model, options, optimizer)


def trained(kind, arguments, count=2):
    torch.manual_seed(0)
    model = Mlp()
    optimizer = made(kind, arguments, model)
    training = wrapped(model, optimizer)
    for step in range(count):
        training(*classified(8, seed=step))
    return model, optimizer, training


def again(model, kind, arguments, lr=0.01):
    """Return a model with these weights and an optimiser without a state."""
    other = copy.deepcopy(model)
    optimizer = made(kind, arguments, other, lr)
    return other, optimizer, wrapped(other, optimizer)


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def changed(state):
    """Return a state with other state tensors and three times the learning rates."""
    new = copy.deepcopy(state)
    for name, value in state["ipu_state"].items():
        new["ipu_state"][name] = value if name.startswith("Step") else 2 * value + 0.5
    for name, value in state["ipu_param"].items():
        new["ipu_param"][name] = 3 * value if is_rate(name) else value
    return new


def without_first_layer(state):
    parts = {
        entry: {
            name: value.clone() for name, value in state[entry].items() if "layers.0" not in name
        }
        for entry in ("ipu_state", "ipu_param")
    }
    return {**state, **parts}


def is_rate(name):
    return name.startswith(("learningRate", "scaledLearningRate0"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_what_was_loaded_is_read_back_and_used(kind, arguments, compiled):
    model, optimizer, training = trained(kind, arguments)
    whole = changed(optimizer.state_dict())
    part = without_first_layer(whole)
    other, second, continued = again(model, kind, arguments)
    if compiled:
        continued.compile(*classified(8))
    second.load_state_dict(part)
    for value in part["ipu_state"].values():
        value.zero_()  # what was loaded is not the program's any more
    read = second.state_dict()
    for entry in ("ipu_state", "ipu_param"):
        assert_same(read[entry], without_first_layer(whole)[entry])
    # A device whose other values are those that an optimiser begins with.
    third_model, third, reference = again(model, kind, arguments)
    reference.compile(*classified(8))
    begun = third.state_dict()
    third.load_state_dict(
        {**begun, **{e: {**begun[e], **read[e]} for e in ("ipu_state", "ipu_param")}}
    )
    for wrapper in (continued, reference):
        wrapper(*classified(8, seed=9))
    assert_equal_weights(other, third_model, rtol=0, atol=0)
    after = second.state_dict()
    assert list(after["ipu_state"]) == list(whole["ipu_state"])
    assert list(after["ipu_param"]) == list(whole["ipu_param"])
    assert_same(without_first_layer(after)["ipu_param"], read["ipu_param"])
    assert training.isCompiled()


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_a_loaded_rate_is_that_of_the_next_step(kind, arguments):
    model, optimizer, _ = trained(kind, arguments)
    state = copy.deepcopy(optimizer.state_dict())
    expected, reference, faster = again(model, kind, arguments, lr=0.03)
    reference.load_state_dict({**copy.deepcopy(state), "ipu_param": None})
    for group in reference.param_groups:
        group["lr"] = 0.03
    for name, value in state["ipu_param"].items():
        if is_rate(name):
            state["ipu_param"][name] = 3 * value
        if name.startswith("weightDecayScaleFactor0"):  # SGD's, which holds a learning rate too
            decay = arguments.get("weight_decay", 0.0)
            state["ipu_param"][name] = torch.tensor(1 - 0.03 * decay)
    found, second, continued = again(model, kind, arguments)
    second.load_state_dict(state)
    batch = classified(8, seed=9)
    for wrapper in (faster, continued):
        wrapper(*batch)
    assert_equal_weights(found, expected)


# Without momentum: LARS would go on with a velocity that has its learning rate already.
@pytest.mark.parametrize(("kind", "arguments"), [*KINDS[:-1], (optim.LARS, {"momentum": 0.0})])
def test_one_parameter_may_have_a_rate_of_its_own(kind, arguments):
    model, optimizer, training = trained(kind, arguments)
    state = optimizer.state_dict()
    (name,) = (n for n in state["ipu_param"] if is_rate(n) and n.endswith(NAME))
    state["ipu_param"][name] = torch.tensor(0.0)
    optimizer.load_state_dict(state)
    before = copy.deepcopy(model.state_dict())
    training(*classified(8, seed=9))
    for parameter, value in model.state_dict().items():
        assert torch.equal(value, before[parameter]) == (parameter == NAME), parameter
    assert optimizer.state_dict()["ipu_param"][name] == 0
    # Another rate that the program sets is that of all.
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    if kind is not optim.SGD:
        assert optimizer.state_dict()["ipu_param"][name].item() == pytest.approx(0.02)
    training.setOptimizer(optimizer)
    training(*classified(8, seed=10))
    assert not torch.equal(model.state_dict()[NAME], before[NAME])


def test_equal_settings_keep_what_was_loaded():
    _, optimizer, training = trained(optim.Adam, {})
    state = optimizer.state_dict()
    state["ipu_param"]["lossScaling_FLOAT"] = torch.tensor(8.0)
    state["ipu_param"][f"learningRate___specific___{NAME}"] = torch.tensor(0.5)
    optimizer.load_state_dict(state)
    for step in range(2):
        training.setOptimizer(optimizer)
        training(*classified(8, seed=step))
    assert_same(optimizer.state_dict()["ipu_param"], state["ipu_param"])
    training.destroy()
    training(*classified(8))
    assert_same(optimizer.state_dict()["ipu_param"], state["ipu_param"])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_learning_rate_that_is_set_after_loading_counts(compiled):
    model, optimizer, _ = trained(optim.Adam, {})
    state = optimizer.state_dict()
    state["ipu_param"] = {n: v * 3 if is_rate(n) else v for n, v in state["ipu_param"].items()}
    _, second, continued = again(model, optim.Adam, {})
    if compiled:
        continued.compile(*classified(8))
    second.load_state_dict(state)
    for group in second.param_groups:
        group["lr"] = 0.25
    continued(*classified(8))
    rates = second.state_dict()["ipu_param"]
    assert {v.item() for n, v in rates.items() if is_rate(n)} == {0.25}


def test_a_learning_rate_that_was_set_before_saving_is_saved():
    model, optimizer, _ = trained(optim.Adam, {})
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    _, second, continued = again(model, optim.Adam, {})
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    continued(*classified(8))
    rates = second.state_dict()["ipu_param"]
    assert {v.item() for n, v in rates.items() if is_rate(n)} == {0.25}


def test_a_loaded_state_outlives_the_program_that_never_got_it():
    _, optimizer, training = trained(optim.Adam, {})
    state = optimizer.state_dict()
    state["ipu_state"] = {n: torch.full_like(v, 7.0) for n, v in state["ipu_state"].items()}
    optimizer.load_state_dict(state)
    training.destroy()
    assert optimizer.state_dict()["ipu_state"][f"Step___{NAME}"] == 7
    training(*classified(8))
    assert optimizer.state_dict()["ipu_state"][f"Step___{NAME}"] == 8


def test_a_checkpoint_holds_loaded_rates(tmp_path):
    model, optimizer, training = trained(optim.SGD, {"momentum": 0.9})
    state = optimizer.state_dict()
    state["ipu_param"][f"scaledLearningRate0___specific___{NAME}"] = torch.tensor(0.125)
    optimizer.load_state_dict(state)
    training(*classified(8))
    TrainingCheckpoints(tmp_path, training).save(1)
    _, second, resumed = again(model, optim.SGD, {"momentum": 0.9})
    TrainingCheckpoints(tmp_path, resumed).resume()
    resumed(*classified(8))
    assert_same(second.state_dict()["ipu_param"], optimizer.state_dict()["ipu_param"])


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4).half()

    def forward(self, x, y):
        out = self.layer(x.half())
        return out, torch.nn.functional.cross_entropy(out.float(), y)


def test_rates_of_half_parameters():
    model = Halves()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    training = wrapped(model, optimizer)
    training(*classified(8))
    state = optimizer.state_dict()
    state["ipu_param"]["learningRate___specific___layer.weight"] = torch.tensor(0.0)
    optimizer.load_state_dict(state)
    before = copy.deepcopy(model.state_dict())
    training(*classified(8))
    assert torch.equal(model.layer.weight, before["layer.weight"])
    assert not torch.equal(model.layer.bias, before["layer.bias"])


def test_rates_of_a_parameters_groups_of_replicas():
    model = Mlp()
    model.layers[2].bias = torch.nn.Parameter(torch.zeros(2, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, quiet_options().replicationFactor(2), optimizer)
    training.layers[2].bias.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    training(*classified(8))
    state = optimizer.state_dict()
    name = "scaledLearningRate0___specific___layers.2.bias"
    state["ipu_param"][name] = torch.tensor([0.0, 0.5])
    optimizer.load_state_dict(state)
    before = model.layers[2].bias.detach().clone()
    training(*classified(8))
    first, second = model.layers[2].bias.detach() - before
    assert not first.any()
    assert second.any()
    assert optimizer.state_dict()["ipu_param"][name].tolist() == [0.0, 0.5]


def test_a_group_of_frozen_parameters_stays():
    model = Mlp()
    model.layers[0].requires_grad_(False)
    optimizer = made(optim.Adam, {}, model)
    training = wrapped(model, optimizer)
    training(*classified(8))
    state = optimizer.state_dict()
    state["ipu_param"][f"learningRate___specific___{NAME}"] = torch.tensor(0.0)
    optimizer.load_state_dict(state)
    before = copy.deepcopy(model.state_dict())
    training(*classified(8))
    assert torch.equal(model.state_dict()[NAME], before[NAME])
    optimizer.param_groups[1]["lr"] = 0.3
    training.setOptimizer(optimizer)
    training(*classified(8))
    moved = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert moved == {NAME, "layers.2.bias"}


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_groups", [True, False])
def test_a_state_of_another_kind_is_refused(with_groups):
    states = {}
    for kind, arguments in KINDS[:5] + KINDS[6:]:
        _, optimizer, _ = trained(kind, arguments, count=1)
        states[kind] = optimizer.state_dict()
        if not with_groups:
            del states[kind]["param_groups"]
    for theirs, mine in itertools.permutations(states, 2):
        if not with_groups and {theirs, mine} <= {optim.Adam, optim.AdamW, optim.LAMB}:
            continue  # the same tensors by the same names
        if not with_groups and {theirs, mine} == {optim.RMSprop, optim.LARS}:
            continue
        optimizer = mine(Mlp().parameters(), lr=0.1)
        before = copy.deepcopy(optimizer.state_dict())
        said = rf"state of poptorch\.optim\..*{theirs.__name__}.* into .*\.{mine.__name__}:"
        with pytest.raises(RuntimeError, match=said):
            optimizer.load_state_dict(states[theirs])
        assert optimizer.state_dict() == before


def test_a_state_of_another_model_is_refused():
    model = Mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    state = optimizer.state_dict()
    renamed = {n.replace("layers", "blocks"): v for n, v in state["ipu_state"].items()}
    mine = Mlp()
    second = optim.Adam(mine.parameters(), lr=0.1)
    second.load_state_dict({**state, "ipu_state": renamed})
    with pytest.raises(
        poptorch.Error, match=r"to another model: it contains Accl1___blocks.*Accl1___l"
    ):
        wrapped(mine, second)(*classified(8))
    wider = Mlp(classes=5)
    third = optim.Adam(wider.parameters(), lr=0.1)
    third.load_state_dict(state)
    with pytest.raises(
        poptorch.Error, match=r"has the shape \[4, 8\]: expected the shape \[5, 8\]"
    ):
        wrapped(wider, third)(*classified(8, classes=5))
