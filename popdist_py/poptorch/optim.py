"""The optimisers of the PopTorch API: torch's, with what the device adds.

These objects hold a program's settings; the update itself runs on the device's copy of the weights
(``device_optimizer.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from popdist_py.poptorch.logger import logger

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

Params = Iterable[Any]
_HALVES: Final = (torch.float16, torch.float32)
# Which argument is the format of each state tensor of Adam and its kin.
_MOMENT_TYPES: Final = {
    "Accl1": "first_order_momentum_accum_type",
    "Accl2": "second_order_momentum_accum_type",
}


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were passed: None means left out."""
    return {name: value for name, value in arguments.items() if value is not None}


class VariableAttributes:
    """Which attributes of an optimiser may change after the model is compiled."""

    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Tell whether ``attr`` is fixed at compile time."""
        self._check(attr)
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Fix ``attr`` at compile time."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let ``attr`` change after compiling."""
        if self.isConstant(attr):
            self._variable_attributes.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed_attributes, (
            f"Unknown attribute {attr}: expected one of {', '.join(self._allowed_attributes)}"
        )


class Optimizer:
    """What all PopTorch optimisers add to torch's: variable attributes and the device's state."""

    # Attributes that torch's class lacks and that are the same for all groups.
    _child_vars: list[str] = []  # noqa: RUF012 - PopTorch's spelling, read by programs
    # All attributes that torch's class lacks.
    _child_only: list[str] = []  # noqa: RUF012
    # The attribute that holds the format of each state tensor, by the device's name of it.
    _accumulators: Mapping[str, str] = {}

    variable_attrs: VariableAttributes
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def _describe(self, given: dict[str, Any], own: dict[str, Any]) -> None:
        """Store the attributes of the device and note which arguments were given.

        Args:
            given: every argument that the program passed.
            own: values of the attributes that torch's class lacks.
        """
        for name, value in own.items():
            setattr(self, name, value)
        allowed = [name for name in self.defaults if name not in ("params", "fused")]
        allowed += [name for name in own if name not in allowed]
        variable = [name for name in given if name in allowed]
        self.variable_attrs = VariableAttributes(sorted({*variable, "lr"}), allowed)
        self._ipu_state: dict[str, torch.Tensor] | None = None
        self._ipu_param: dict[str, torch.Tensor] | None = None
        self._pending = False
        self._fetch: Callable[[], None] | None = None

    # -- the state on the device --------------------------------------------------------------

    def _connect(self, fetch: Callable[[], None]) -> None:
        """Meet a device, which gets the state there is; ``fetch`` is called before it is read."""
        self._fetch = fetch
        self._pending = self._ipu_state is not None

    def _set_device_state(
        self, state: dict[str, torch.Tensor], settings: dict[str, torch.Tensor]
    ) -> None:
        self._ipu_state = {
            name: value.to(self._state_type(name.partition("___")[0]) or value.dtype)
            for name, value in state.items()
        }
        self._ipu_param = settings

    def _state_type(self, name: str) -> torch.dtype | None:
        """Return float16 if the state tensors ``name`` (Accl1, ...) are kept in it, else None."""
        wanted = getattr(self, self._accumulators.get(name, ""), torch.float32)
        return torch.float16 if wanted == torch.float16 else None

    def _take_pending(self) -> dict[str, torch.Tensor] | None:
        """Return the state that was loaded and not yet given to the device, once."""
        if not self._pending:
            return None
        self._pending = False
        return self._ipu_state

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state: ``ipu_state`` and ``ipu_param`` are None before compiling."""
        if self._fetch is not None and not self._pending:
            self._fetch()
        base = super().state_dict()  # type: ignore[misc]
        return {
            "ipu_state": self._ipu_state,
            "ipu_param": self._ipu_param,
            "state": base["state"],
            "param_groups": base["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what state_dict() returned; the device gets it with the next call.

        Raises:
            RuntimeError: an empty state, or one that no PopTorch optimiser wrote.
        """
        if not state_dict:
            raise RuntimeError("Cannot load the optimizer state because it is empty")
        if "ipu_state" not in state_dict or "ipu_param" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU: the keys ipu_state and "
                "ipu_param are missing"
            )
        if "param_groups" in state_dict:
            super().load_state_dict(  # type: ignore[misc]
                {
                    "state": state_dict.get("state", {}),
                    "param_groups": state_dict["param_groups"],
                }
            )
        if state_dict["ipu_state"] is not None:
            if self._fetch is not None and not self._pending:
                self._fetch()
            self._ipu_state = {**(self._ipu_state or {}), **state_dict["ipu_state"]}
            self._ipu_param = {**(self._ipu_param or {}), **(state_dict["ipu_param"] or {})}
            self._pending = True

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state, the device's, and what programs put on the object."""
        if self._fetch is not None and not self._pending:
            self._fetch()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        own = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith(("_optimizer_", "_fetch", "_zero_grad", "_warned"))
            and not callable(value)
        }
        # A copy meets a new device, which has to be given the state.
        return {**own, **state, "_fetch": None, "_pending": self._ipu_state is not None}


def _check_types(**types: torch.dtype) -> None:
    for name, dtype in types.items():
        assert dtype in _HALVES, f"{name} must be either torch.float32 or torch.float16"


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with torch.optim.SGD's arithmetic.

    Args:
        loss_scaling: factor on the loss before, and divisor of the gradients after the backward.
        velocity_scaling: factor on the velocity of the combined accumulator.
        use_combined_accum: let velocity and gradient accumulator share one tensor.
        accum_type: float32 or float16, the format of the gradient accumulator.
        velocity_accum_type: the same for the velocity.
        max_grad_norm: the gradients' global 2-norm is clipped to this.
    """

    _child_vars = ["loss_scaling"]  # noqa: RUF012
    _child_only = [  # noqa: RUF012
        "loss_scaling",
        "velocity_scaling",
        "use_combined_accum",
        "accum_type",
        "velocity_accum_type",
        "max_grad_norm",
    ]
    _accumulators = {"Accl1": "velocity_accum_type"}  # noqa: RUF012

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        torch_arguments = _given(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
        )
        own = _given(
            loss_scaling=loss_scaling,
            velocity_scaling=velocity_scaling,
            use_combined_accum=use_combined_accum,
            accum_type=accum_type,
            velocity_accum_type=velocity_accum_type,
            max_grad_norm=max_grad_norm,
        )
        torch.optim.SGD.__init__(self, params, **torch_arguments)
        scaling = own.get("velocity_scaling", 1.0)
        self.defaults["velocity_scaling"] = scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", scaling)
        values = {
            "loss_scaling": 1.0,
            "use_combined_accum": False,
            "accum_type": torch.float32,
            "velocity_accum_type": torch.float32,
            "max_grad_norm": math.inf,
            **{name: value for name, value in own.items() if name != "velocity_scaling"},
        }
        _check_types(
            accum_type=values["accum_type"], velocity_accum_type=values["velocity_accum_type"]
        )
        self._describe({**torch_arguments, **own}, values)
        if "velocity_scaling" in own and not values["use_combined_accum"]:
            logger.warning(
                "velocity_scaling is ignored: it only applies with use_combined_accum=True"
            )


def _moments(
    accum_type: torch.dtype | None, first: torch.dtype | None, second: torch.dtype | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the accumulation types that were given, and all of them with defaults."""
    given = _given(
        accum_type=accum_type,
        first_order_momentum_accum_type=first,
        second_order_momentum_accum_type=second,
    )
    values = dict.fromkeys(
        (
            "accum_type",
            "first_order_momentum_accum_type",
            "second_order_momentum_accum_type",
        ),
        torch.float32,
    )
    values.update(given)
    _check_types(**values)
    return given, values


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with torch.optim.Adam's arithmetic; the extra arguments are those of SGD."""

    _child_vars = ["loss_scaling"]  # noqa: RUF012
    _child_only = [  # noqa: RUF012
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "max_grad_norm",
    ]
    _accumulators = _MOMENT_TYPES

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        torch_arguments = _given(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        torch.optim.Adam.__init__(self, params, **torch_arguments)
        types, values = _moments(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        own = _given(loss_scaling=loss_scaling, max_grad_norm=max_grad_norm)
        self._describe(
            {**torch_arguments, **types, **own},
            {"loss_scaling": 1.0, **values, "max_grad_norm": math.inf, **own},
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, with torch.optim.AdamW's arithmetic.

    Args:
        bias_correction: accepted; the correction is always applied, as on the device.
    """

    _child_vars = ["loss_scaling"]  # noqa: RUF012
    _child_only = [  # noqa: RUF012
        "loss_scaling",
        "bias_correction",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "max_grad_norm",
    ]
    _accumulators = _MOMENT_TYPES

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        torch_arguments = _given(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        torch.optim.AdamW.__init__(self, params, **torch_arguments)
        types, values = _moments(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        own = _given(
            loss_scaling=loss_scaling,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
        )
        self._describe(
            {**torch_arguments, **types, **own},
            {
                "loss_scaling": 1.0,
                "bias_correction": True,
                **values,
                "max_grad_norm": math.inf,
                **own,
            },
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, with torch.optim.RMSprop's arithmetic or TensorFlow's.

    Args:
        use_tf_variant: the mean square starts at ones, eps is inside the root, and the learning
            rate is folded into the momentum buffer.
    """

    _child_vars = ["loss_scaling"]  # noqa: RUF012
    _child_only = [  # noqa: RUF012
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "use_tf_variant",
    ]
    _accumulators = {  # noqa: RUF012
        "Accl1": "second_order_momentum_accum_type",
        "Accl2": "first_order_momentum_accum_type",
        "Accl3": "first_order_momentum_accum_type",
    }

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        torch_arguments = _given(
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
        )
        torch.optim.RMSprop.__init__(self, params, **torch_arguments)
        types, values = _moments(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        own = _given(loss_scaling=loss_scaling, use_tf_variant=use_tf_variant)
        self._describe(
            {**torch_arguments, **types, **own},
            {"loss_scaling": 1.0, **values, "use_tf_variant": False, **own},
        )


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments; ``step()`` also works on the CPU, as a reference.

    The update is ``m / (sqrt(v) + eps) + weight_decay * w`` with bias-corrected moments m and v;
    the trust ratio is ``min(|w|, max_weight_norm) / |update|``, or 1 where either is 0.
    """

    _child_vars = ["loss_scaling"]  # noqa: RUF012
    _child_only = [  # noqa: RUF012
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
    ]
    _accumulators = _MOMENT_TYPES

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        group_arguments = _given(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_weight_norm=max_weight_norm,
        )
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "bias_correction": True,
            "max_weight_norm": 65500.0,
            **group_arguments,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        types, values = _moments(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        own = _given(loss_scaling=loss_scaling)
        self._describe({**group_arguments, **types, **own}, {"loss_scaling": 1.0, **values, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Update the parameters of one group, all with one call per operation."""
        beta1, beta2 = group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        step = int(states[0]["step"])
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        first_scale = 1 - beta1**step if group["bias_correction"] else 1.0
        second_scale = 1 - beta2**step if group["bias_correction"] else 1.0
        divisors = torch._foreach_sqrt(torch._foreach_div(seconds, second_scale))
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(firsts, first_scale), divisors)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)
        limit = group["max_weight_norm"]
        for parameter, update, (weight, size) in zip(parameters, updates, norms, strict=True):
            ratio = weight.clamp(max=limit) / size
            trust = torch.where((weight == 0) | (size == 0), torch.ones_like(ratio), ratio)
            parameter.sub_(update * (trust * group["lr"]))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
