"""What every optimiser of the PopTorch API has beside torch's: its settings and its state.

The optimisers themselves are in ``optim.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from popdist_py.poptorch.optimizer_state import LoadedState, Rates, copied, writers_of

__all__ = ["Optimizer", "VariableAttributes"]


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
        mine = next(kind.__name__ for kind in type(self).__mro__ if Optimizer in kind.__bases__)
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
