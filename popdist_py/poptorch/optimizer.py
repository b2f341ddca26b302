"""The class ``Optimizer``, the common base class of all optimisers of the PopTorch API.

The module ``optim.py`` defines the optimisers, such as SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from popdist_py.poptorch.optimizer_state import LoadedState, Rates, copied, writers_of

__all__ = ["Optimizer", "VariableAttributes"]


class VariableAttributes:
    """The attributes of an optimiser that may change after the model is compiled."""

    def __init__(self, variable_attributes: list[str], allowed_attributes: list[str]) -> None:
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        """Tell whether the attribute ``attr`` becomes fixed when the model is compiled."""
        self._check(attr)
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Make the attribute ``attr`` constant after the compilation of the model."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute ``attr`` change after the compilation of the model."""
        if self.isConstant(attr):
            self._variable_attributes.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed_attributes, (
            f"The optimizer has no attribute {attr}: expected one of "
            f"{', '.join(self._allowed_attributes)}"
        )


class Optimizer:
    """The base of PopTorch optimisers, with settings that may change and the device's state."""

    # The constructor's arguments that the base class of torch does not have, with their defaults.
    # The optimiser stores the arguments in ``_own`` as attributes or in its parameter groups.
    _own: ClassVar[Mapping[str, Any]] = {}
    # The names of the arguments in ``_own`` that can have a different value in each parameter
    # group.
    _own_per_group: ClassVar[tuple[str, ...]] = ()
    # Programs read the attributes ``_child_only`` and ``_child_vars``, which the optimisers of
    # Graphcore's PopTorch also have. ``_child_only`` lists all arguments in ``_own``.
    # ``_child_vars`` lists the arguments that have the same value for all parameter groups.
    _child_only: list[str] = []  # noqa: RUF012
    _child_vars: list[str] = ["loss_scaling"]  # noqa: RUF012
    # The keys are the names of state tensors on the device, and the values are the names of the
    # attributes that contain the tensors' dtypes.
    _accumulators: ClassVar[Mapping[str, str]] = {}

    variable_attrs: VariableAttributes
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def _begin(self, base: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        """Pass torch's arguments of a constructor to torch's optimiser, and store the others.

        Args:
            base: The optimiser class of torch that this optimiser extends.
            arguments: The result of ``locals()`` at the beginning of the constructor, which
                contains the constructor's arguments. An argument with the value None was not passed
                by the program.

        Raises:
            AssertionError: An argument for the dtype of an accumulator is neither float32 nor
                float16.
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
        # The rates (such as learning rates) that the program had set when ``_ipu_param`` was
        # stored.
        self._rates_then: Rates | None = None
        self._pending = False
        self._fetch: Callable[[], None] | None = None

    # -- The optimiser's state on the device --------------------------------------------------

    def _connect(self, fetch: Callable[[], None]) -> None:
        """Connect the optimiser to a device, which receives the optimiser's state, if any.

        Args:
            fetch: A function that copies the optimiser state from the device to the optimiser. The
                optimiser calls ``fetch`` before the program reads the optimiser state.
        """
        self._fetch = fetch
        self._pending = self._has_state

    @property
    def _has_state(self) -> bool:
        return self._ipu_state is not None or self._ipu_param is not None

    def _rates(self) -> Rates:
        own: Any = self  # Every subclass of Optimizer is also a subclass of a torch optimiser.
        return Rates.of(own)

    def _set_device_state(self, state: dict[str, torch.Tensor]) -> None:
        self._ipu_state = {
            name: value.to(self._state_type(name.partition("___")[0]) or value.dtype)
            for name, value in state.items()
        }

    def _set_device_rates(self, rates: dict[str, torch.Tensor]) -> None:
        self._ipu_param, self._rates_then = rates, self._rates()

    def _state_type(self, name: str) -> torch.dtype | None:
        """Return float16 if the state tensors ``name`` (such as Accl1) have this dtype, or None."""
        wanted = getattr(self, self._accumulators.get(name, ""), torch.float32)
        return torch.float16 if wanted == torch.float16 else None

    def _state_to_load(self) -> LoadedState | None:
        """Return a loaded optimiser state that the device has not received yet, or None."""
        if not self._pending:
            return None
        # A rate, such as a learning rate, that the program sets after it has loaded a state
        # overrides the rate in the loaded state.
        is_current = self._rates_then == self._rates()
        return LoadedState(self._ipu_state or {}, (self._ipu_param or {}) if is_current else {})

    def _note_loaded(self) -> None:
        """Record that the device has received the optimiser state that the program loaded."""
        self._pending = False

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the optimiser and its state on the device.

        Before the model is compiled, ``ipu_state`` and ``ipu_param`` are None. If the program has
        loaded a state, the loaded state is returned unchanged until the device has received it.
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
        """Load a state that ``state_dict()`` returned and that the program may have changed.

        The device receives the loaded state with the next call of the model. If an entry of the
        optimiser state is missing in the loaded state, the device keeps its present value of the
        entry. The rates in ``ipu_param`` apply until the program sets another learning rate, weight
        decay, dampening or loss scaling.

        Raises:
            RuntimeError: The loaded state is empty, does not come from a PopTorch optimiser, or
                comes from another kind of optimiser.
        """
        if not state_dict:
            raise RuntimeError("Cannot load the optimizer state because it is empty")
        if "ipu_state" not in state_dict or "ipu_param" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU, but the given state does "
                "not have the keys ipu_state and ipu_param: load the state_dict() of a "
                "poptorch.optim optimizer"
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
        """Check that a loaded state comes from an optimiser of the same kind as this optimiser.

        Raises:
            RuntimeError: The loaded state comes from another kind of optimiser.
        """
        writers = writers_of(state_dict)
        mine = next(kind.__name__ for kind in type(self).__mro__ if Optimizer in kind.__bases__)
        if writers and mine not in writers:
            raise RuntimeError(
                f"Cannot load the state of poptorch.optim.{' or '.join(writers)} into "
                f"poptorch.optim.{mine}: make an optimizer of the class that saved the state, or "
                "load only the saved weights and let this optimizer begin without a state"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the values of the optimiser to pickle, which include its state on the device."""
        if self._fetch is not None and not self._pending:
            self._fetch()
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        own = {
            name: value
            for name, value in vars(self).items()
            if not name.startswith(("_optimizer_", "_fetch", "_zero_grad", "_warned"))
            and not callable(value)
        }
        # A copy of the optimiser will be connected to another device, and the other device must
        # receive the optimiser state.
        return {**own, **state, "_fetch": None, "_pending": self._has_state}
