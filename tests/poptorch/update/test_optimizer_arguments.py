"""Each argument of each optimiser has an effect, is refused, or a warning says it has none."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from support.models import Mlp, classified, quiet_options

from popdist_py import poptorch
from popdist_py.poptorch import optim
from popdist_py.poptorch.on_ipu.run_from_options import optimizer_of

KINDS = {
    kind.__name__: kind
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB, optim.LARS)
}
# For each argument, a value other than its default, and the arguments that it needs.
GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "lr": (0.5, {}),
    "momentum": (0.5, {}),
    "dampening": (0.5, {"momentum": 0.9}),
    "weight_decay": (0.3, {}),
    "nesterov": (True, {"momentum": 0.9}),
    "maximize": (True, {}),
    "loss_scaling": (7.0, {}),
    "use_combined_accum": (True, {"momentum": 0.9}),
    "accum_type": (torch.float16, {}),
    "velocity_accum_type": (torch.float16, {"momentum": 0.9}),
    "first_order_momentum_accum_type": (torch.float16, {"momentum": 0.9}),
    "second_order_momentum_accum_type": (torch.float16, {}),
    "max_grad_norm": (1e-3, {}),
    "betas": ((0.5, 0.6), {}),
    "eps": (0.1, {}),
    "bias_correction": (False, {}),
    "alpha": (0.5, {}),
    "centered": (True, {}),
    "use_tf_variant": (True, {}),
    "max_weight_norm": (1e-3, {}),
    "eeta": (0.1, {}),
    "epsilon": (0.1, {}),
    "adapt": (False, {}),
}
SAID = {
    "foreach": (True, {}, "SGD got arguments without effect (foreach)"),
    "fused": (True, {}, "AdamW got arguments without effect (fused)"),
    "capturable": (True, {}, "AdamW got arguments without effect (capturable)"),
    "differentiable": (True, {}, "SGD got arguments without effect (differentiable)"),
    "velocity_scaling": (3.0, {}, "The optimizer ignores velocity_scaling, which has"),
    "velocity_scaling combined": (
        3.0, {"use_combined_accum": True}, "velocity_scaling has no effect on emulated IPUs",
    ),
}  # fmt: skip
REFUSED = {"amsgrad"}


def arguments_of(kind):
    return list(inspect.signature(kind.__init__).parameters)[2:]


def after_two_steps(kind, **arguments):
    """Return weights, state and rates, and the modelled bytes for each element."""
    torch.manual_seed(0)
    model = Mlp()
    known = {name: v for name, v in arguments.items() if name in arguments_of(kind)}
    optimizer = kind(model.parameters(), **{"lr": 0.1, **known})
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    for seed in range(2):
        training(*classified(4, seed=seed))
    state = optimizer.state_dict()
    return (
        [parameter.tolist() for parameter in model.parameters()],
        {name: (str(value.dtype), value.tolist()) for name, value in state["ipu_state"].items()},
        {name: value.tolist() for name, value in state["ipu_param"].items()},
        optimizer_of(optimizer),
    )


def test_every_argument_has_an_entry():
    said = {name.split()[0] for name in SAID}
    assert {*GIVEN, *said, *REFUSED} == {n for kind in KINDS.values() for n in arguments_of(kind)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_argument_acts(kind):
    plain = {}
    idle = []
    for name in arguments_of(kind):
        if name not in GIVEN:
            continue
        value, beside = GIVEN[name]
        key = repr(beside)
        if key not in plain:
            plain[key] = after_two_steps(kind, **beside)
        if after_two_steps(kind, **beside, **{name: value}) == plain[key]:
            idle.append(name)
    assert idle == []


@pytest.mark.parametrize("what", SAID)
def test_what_does_nothing_is_said_once(what, caplog):
    name = what.split()[0]
    value, beside, line = SAID[what]
    kind = next(each for each in (optim.SGD, optim.AdamW) if name in arguments_of(each))
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.1, **beside, **{name: value})
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    training.setOptimizer(optimizer)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage().startswith(line)


def test_torchs_own_optimisers_say_it_too(caplog):
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    poptorch.trainingModel(model, quiet_options(), optimizer)
    (record,) = caplog.records
    assert record.getMessage().startswith("AdamW got arguments without effect (fused)")
