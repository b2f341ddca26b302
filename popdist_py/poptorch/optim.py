"""The optimisers of the PopTorch API: torch's, with what the device adds.

These objects hold a program's settings; the update itself runs on the device's copy of the weights
(``update/device_optimizer.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from popdist_py.poptorch import layerwise, old_spellings
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.optimizer_state import LoadedState, Rates, copied, writers_of

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

Params = Iterable[Any]
# Which argument is the format of each state tensor of Adam and its kin.
_MOMENTS: Final = {
    "Accl1": "first_order_momentum_accum_type",
    "Accl2": "second_order_momentum_accum_type",
}
_MOMENT_TYPES: Final = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}

# Said when it is given, and when it changes later.
VELOCITY_SCALING_IGNORED: Final = (
    "velocity_scaling is ignored: it only applies with use_combined_accum=True"
)


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

    # The arguments that torch's class lacks, with their defaults: attributes of the optimiser.
    _own: ClassVar[Mapping[str, Any]] = {}
    # Those of them that each parameter group has a value of.
    _own_per_group: ClassVar[tuple[str, ...]] = ()
    # The names of all of them and of those that are the same for all groups: PopTorch's spelling,
    # read by programs.
    _child_only: list[str] = []  # noqa: RUF012
    _child_vars: list[str] = ["loss_scaling"]  # noqa: RUF012
    # The attribute that holds the format of each state tensor, by the device's name of it.
    _accumulators: ClassVar[Mapping[str, str]] = {}

    variable_attrs: VariableAttributes
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def _begin(self, base: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        """Be made: torch's class takes its own arguments, the others become attributes.

        Args:
            base: torch's class.
            arguments: ``locals()`` of a constructor that has done nothing else yet, so that its
                arguments need no second list; None means left out.

        Raises:
            AssertionError: the format of an accumulator is neither float32 nor float16.
        """
        passed = {n: v for n, v in arguments.items() if v is not None and n != "self"}
        torchs: dict[str, Any] = {n: v for n, v in passed.items() if n not in self._own}
        base.__init__(self, **torchs)  # type: ignore[arg-type]
        attributes = {name: passed.get(name, default) for name, default in self._own.items()}
        for name in self._own_per_group:
            self.defaults[name] = attributes.pop(name)
            for group in self.param_groups:
                group.setdefault(name, self.defaults[name])
        for name, value in attributes.items():
            wants_format = isinstance(self._own[name], torch.dtype)
            assert not wants_format or value in (torch.float16, torch.float32), (
                f"{name} must be either torch.float32 or torch.float16"
            )
            setattr(self, name, value)
        allowed = [name for name in self.defaults if name not in ("params", "fused")]
        allowed += [name for name in attributes if name not in allowed]
        variable = [name for name in passed if name in allowed]
        self.variable_attrs = VariableAttributes(sorted({*variable, "lr"}), allowed)
        self._ipu_state: dict[str, torch.Tensor] | None = None
        self._ipu_param: dict[str, torch.Tensor] | None = None
        self._rates_then: Rates | None = None  # the program's when ipu_param was taken
        self._pending = False
        self._fetch: Callable[[], None] | None = None

    # -- the state on the device --------------------------------------------------------------

    def _connect(self, fetch: Callable[[], None]) -> None:
        """Meet a device, which gets the state there is; ``fetch`` is called before it is read."""
        self._fetch = fetch
        self._pending = self._has_state

    @property
    def _has_state(self) -> bool:
        return self._ipu_state is not None or self._ipu_param is not None

    def _rates(self) -> Rates:
        own: Any = self  # every subclass is one of torch's optimisers too
        return Rates.of(own)

    def _set_device_state(self, state: dict[str, torch.Tensor]) -> None:
        self._ipu_state = {
            name: value.to(self._state_type(name.partition("___")[0]) or value.dtype)
            for name, value in state.items()
        }

    def _set_device_rates(self, rates: dict[str, torch.Tensor]) -> None:
        self._ipu_param, self._rates_then = rates, self._rates()

    def _state_type(self, name: str) -> torch.dtype | None:
        """Return float16 if the state tensors ``name`` (Accl1, ...) are kept in it, else None."""
        wanted = getattr(self, self._accumulators.get(name, ""), torch.float32)
        return torch.float16 if wanted == torch.float16 else None

    def _state_to_load(self) -> LoadedState | None:
        """Return the state that was loaded and not yet given to the device, if there is one."""
        if not self._pending:
            return None
        # What a program sets after loading counts: a learning rate of its own, for example.
        is_current = self._rates_then == self._rates()
        return LoadedState(self._ipu_state or {}, (self._ipu_param or {}) if is_current else {})

    def _note_loaded(self) -> None:
        """Note that the device has got that state."""
        self._pending = False

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state: ``ipu_state`` and ``ipu_param`` are None before compiling.

        What was loaded is returned as it was until the device has got it.
        """
        if self._fetch is not None and not self._pending:
            self._fetch()
        base = super().state_dict()  # type: ignore[misc]
        return {
            "ipu_state": None if self._ipu_state is None else dict(self._ipu_state),
            "ipu_param": None if self._ipu_param is None else dict(self._ipu_param),
            "state": base["state"],
            "param_groups": base["param_groups"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what state_dict() returned, changed or not; the device gets it with the next call.

        The device keeps its values of entries that are left out. The rates in ``ipu_param`` hold
        until the program sets another learning rate, weight decay, dampening or loss scaling.

        Raises:
            RuntimeError: an empty state, one that no PopTorch optimiser wrote, or that of another
                kind of optimiser.
        """
        if not state_dict:
            raise RuntimeError("Cannot load the optimizer state because it is empty")
        if "ipu_state" not in state_dict or "ipu_param" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU: the keys ipu_state and "
                "ipu_param are missing"
            )
        self._check_writer(state_dict)
        if "param_groups" in state_dict:
            super().load_state_dict(  # type: ignore[misc]
                {
                    "state": state_dict.get("state", {}),
                    "param_groups": state_dict["param_groups"],
                }
            )
        if state_dict["ipu_state"] is not None or state_dict["ipu_param"] is not None:
            self._ipu_state = copied(state_dict["ipu_state"])
            self._ipu_param = copied(state_dict["ipu_param"])
            self._rates_then = self._rates()
            self._pending = True

    def _check_writer(self, state_dict: Mapping[str, Any]) -> None:
        """Check that an optimiser of this kind wrote a state.

        Raises:
            RuntimeError: another kind did.
        """
        writers = writers_of(state_dict)
        mine = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        if writers and mine not in writers:
            raise RuntimeError(
                f"Cannot load the state of poptorch.optim.{' or '.join(writers)} into "
                f"poptorch.optim.{mine}: make the optimizer that the state was saved of, or go on "
                "with the saved weights alone and let this optimizer begin without a state"
            )

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
        return {**own, **state, "_fetch": None, "_pending": self._has_state}


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

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    _own_per_group = ("velocity_scaling",)
    _child_only = list(_own)  # noqa: RUF012
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
        self._begin(torch.optim.SGD, locals())
        default = self._own["velocity_scaling"]
        is_given = velocity_scaling is not None or any(
            group["velocity_scaling"] != default for group in self.param_groups
        )
        if is_given and not use_combined_accum:
            logger.warning(VELOCITY_SCALING_IGNORED)


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with torch.optim.Adam's arithmetic; the extra arguments are those of SGD."""

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES, "max_grad_norm": math.inf}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.Adam()")
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
        self._begin(torch.optim.Adam, locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, with torch.optim.AdamW's arithmetic.

    Args:
        bias_correction: accepted; the correction is always applied, as on the device.
    """

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **_MOMENT_TYPES,
        "max_grad_norm": math.inf,
    }
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.AdamW()")
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
        self._begin(torch.optim.AdamW, locals())
        if bias_correction is False:
            logger.warning(
                "bias_correction=False is ignored: AdamW corrects the bias on the device too; "
                "poptorch.optim.LAMB can leave it out"
            )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, with torch.optim.RMSprop's arithmetic or TensorFlow's.

    Args:
        use_tf_variant: the mean square starts at ones, eps is inside the root, and the learning
            rate is folded into the momentum buffer.
    """

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES, "use_tf_variant": False}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = {  # noqa: RUF012
        "Accl1": "second_order_momentum_accum_type",
        "Accl2": "first_order_momentum_accum_type",
        "Accl3": "first_order_momentum_accum_type",
    }

    @old_spellings.takes("poptorch.optim.RMSprop()")
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
        self._begin(torch.optim.RMSprop, locals())


class LAMB(Optimizer, layerwise.LAMB):
    """Layer-wise adaptive moments; ``step()`` also works on the CPU, as a reference.

    The update is ``m / (sqrt(v) + eps) + weight_decay * w`` with bias-corrected moments m and v;
    the trust ratio is ``min(|w|, max_weight_norm) / |update|``, or 1 where either is 0.
    """

    _own: ClassVar = {"loss_scaling": 1.0, **_MOMENT_TYPES}
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = _MOMENTS

    @old_spellings.takes("poptorch.optim.LAMB()")
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
        self._begin(layerwise.LAMB, locals())


class LARS(Optimizer, layerwise.LARS):
    """SGD with layer-wise adaptive rates; ``step()`` also works on the CPU, as a reference.

    For a parameter w with gradient g and velocity v, which starts at 0::

        trust = eeta * |w| / (|g| + weight_decay * |w| + epsilon), or 1 where |w| or |g| is 0
        v = momentum * v + trust * lr * (g + weight_decay * w)
        w = w - v

    The norms are of whole parameters, and of gradients without loss scaling. The learning rate is
    inside the velocity, so a new one counts from then on; in torch's SGD it is outside. This is
    algorithm 1 of You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks",
    2017; epsilon and what holds at norms of 0 are those of MLPerf's ResNet-50 (LARSOptimizer).
    PopTorch has no LARS.

    Args:
        eeta: the trust coefficient.
        epsilon: added to the divisor.
        adapt: False lets trust be 1. Norms and biases usually have a parameter group with
            ``{"adapt": False, "weight_decay": 0.0}``.
        loss_scaling, accum_type, velocity_accum_type, max_grad_norm: as for SGD.

    Raises:
        ValueError: a number is below 0.
    """

    _own: ClassVar = {
        "loss_scaling": 1.0,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }
    _child_only = list(_own)  # noqa: RUF012
    _accumulators = {"Accl1": "velocity_accum_type"}  # noqa: RUF012

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        weight_decay: float | None = None,
        eeta: float | None = None,
        epsilon: float | None = None,
        adapt: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._begin(layerwise.LARS, locals())


if not TYPE_CHECKING:  # a type checker goes on finding names that do not exist
    __getattr__ = old_spellings.module_names("poptorch.optim", __name__)
