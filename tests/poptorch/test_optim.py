"""The optimisers as a program sees them: signatures, attributes, and which may change."""

import inspect
import math

import pytest
import torch

from popdist_py.poptorch import optim

# The arguments after params, with their types; all but the lr of SGD and LARS may be left out.
_SIGNATURES = {
    "SGD": {
        "lr": "float",
        "momentum": "float | None",
        "dampening": "float | None",
        "weight_decay": "float | None",
        "nesterov": "bool | None",
        "maximize": "bool | None",
        "foreach": "bool | None",
        "differentiable": "bool | None",
        "loss_scaling": "float | None",
        "velocity_scaling": "float | None",
        "use_combined_accum": "bool | None",
        "accum_type": "torch.dtype | None",
        "velocity_accum_type": "torch.dtype | None",
        "max_grad_norm": "float | None",
    },
    "Adam": {
        "lr": "float | None",
        "betas": "tuple[float, float] | None",
        "eps": "float | None",
        "weight_decay": "float | None",
        "amsgrad": "bool | None",
        "foreach": "bool | None",
        "maximize": "bool | None",
        "capturable": "bool | None",
        "differentiable": "bool | None",
        "fused": "bool | None",
        "loss_scaling": "float | None",
        "accum_type": "torch.dtype | None",
        "first_order_momentum_accum_type": "torch.dtype | None",
        "second_order_momentum_accum_type": "torch.dtype | None",
        "max_grad_norm": "float | None",
    },
    "AdamW": {
        "lr": "float | None",
        "betas": "tuple[float, float] | None",
        "eps": "float | None",
        "weight_decay": "float | None",
        "amsgrad": "bool | None",
        "maximize": "bool | None",
        "foreach": "bool | None",
        "capturable": "bool | None",
        "differentiable": "bool | None",
        "fused": "bool | None",
        "loss_scaling": "float | None",
        "bias_correction": "bool | None",
        "accum_type": "torch.dtype | None",
        "first_order_momentum_accum_type": "torch.dtype | None",
        "second_order_momentum_accum_type": "torch.dtype | None",
        "max_grad_norm": "float | None",
    },
    "RMSprop": {
        "lr": "float | None",
        "alpha": "float | None",
        "eps": "float | None",
        "weight_decay": "float | None",
        "momentum": "float | None",
        "centered": "bool | None",
        "foreach": "bool | None",
        "maximize": "bool | None",
        "differentiable": "bool | None",
        "loss_scaling": "float | None",
        "accum_type": "torch.dtype | None",
        "first_order_momentum_accum_type": "torch.dtype | None",
        "second_order_momentum_accum_type": "torch.dtype | None",
        "use_tf_variant": "bool | None",
    },
    "LAMB": {
        "lr": "float | None",
        "betas": "tuple[float, float] | None",
        "eps": "float | None",
        "weight_decay": "float | None",
        "bias_correction": "bool | None",
        "loss_scaling": "float | None",
        "max_weight_norm": "float | None",
        "accum_type": "torch.dtype | None",
        "first_order_momentum_accum_type": "torch.dtype | None",
        "second_order_momentum_accum_type": "torch.dtype | None",
    },
    "LARS": {
        "lr": "float",
        "momentum": "float | None",
        "weight_decay": "float | None",
        "eeta": "float | None",
        "epsilon": "float | None",
        "adapt": "bool | None",
        "loss_scaling": "float | None",
        "accum_type": "torch.dtype | None",
        "velocity_accum_type": "torch.dtype | None",
        "max_grad_norm": "float | None",
    },
}

# The attributes that torch's class lacks, with their defaults.
_OWN = {
    "SGD": {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    },
    "Adam": {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    },
    "AdamW": {
        "loss_scaling": 1.0,
        "bias_correction": True,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    },
    "RMSprop": {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
        "use_tf_variant": False,
    },
    "LAMB": {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
    },
    "LARS": {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    },
}


def _made(name, **arguments):
    return getattr(optim, name)([torch.nn.Parameter(torch.ones(1))], **{"lr": 0.1} | arguments)


@pytest.mark.parametrize("name", _SIGNATURES)
def test_signatures_stay(name):
    params, *others = inspect.signature(getattr(optim, name)).parameters.values()
    assert (params.name, params.default) == ("params", params.empty)
    assert [(each.name, each.annotation) for each in others] == list(_SIGNATURES[name].items())
    required = [each.name for each in others if each.default is not None]
    assert required == (["lr"] if name in ("SGD", "LARS") else [])
    assert {each.kind for each in (params, *others)} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", _OWN)
def test_arguments_that_torch_lacks_are_attributes(name):
    optimizer = _made(name)
    assert optimizer._child_only == list(_OWN[name])
    assert optimizer._child_vars == ["loss_scaling"]
    for attribute, default in _OWN[name].items():
        if attribute == "velocity_scaling":
            assert optimizer.param_groups[0][attribute] == default
            continue
        assert getattr(optimizer, attribute) == default
        other = torch.float16 if isinstance(default, torch.dtype) else not default or 2.0
        changed = _made(name, **{attribute: other})
        assert getattr(changed, attribute) == other
        assert not changed.variable_attrs.isConstant(attribute)
        assert optimizer.variable_attrs.isConstant(attribute)


@pytest.mark.parametrize("name", _SIGNATURES)
def test_arguments_of_torch_are_settings_of_the_groups(name):
    optimizer = _made(name, weight_decay=0.5)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.5)
    assert not hasattr(optimizer, "weight_decay")
    assert not optimizer.variable_attrs.isConstant("weight_decay")
    assert not optimizer.variable_attrs.isConstant("lr")


@pytest.mark.parametrize("name", _OWN)
def test_accumulators_have_one_of_two_formats(name):
    for attribute, default in _OWN[name].items():
        if isinstance(default, torch.dtype):
            with pytest.raises(AssertionError, match=f"^{attribute} must be either torch.float32"):
                _made(name, **{attribute: torch.float64})


def test_velocity_scaling_is_a_setting_of_each_group(caplog):
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "velocity_scaling": 3.0},
        {"params": [torch.nn.Parameter(torch.ones(1))]},
    ]
    optimizer = optim.SGD(groups, lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
    assert [group["velocity_scaling"] for group in optimizer.param_groups] == [3.0, 2.0]
    assert not optimizer.variable_attrs.isConstant("velocity_scaling")
    _made("SGD", velocity_scaling=2.0)
    assert "ignores velocity_scaling" in caplog.text
