"""The class MultiConv, a hint to the device that some convolutions may run in parallel.

A MultiConv does not change the results of a model. The checks of a MultiConv's settings are the
same as in Graphcore's PopTorch. The settings of a MultiConv must be valid, and a MultiConv must
contain at least one convolution.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from popdist_py.errors import counted
from popdist_py.poptorch.enums import MultiConvPlanType
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.tracing.block_recorder import current_blocks

__all__ = ["MultiConv"]

_CONVOLUTIONS: Final = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
        torch.convolution,
    }
)


class _Counter(TorchFunctionMode):
    """Counts the convolutions that run inside the ``with`` block of a MultiConv."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        self.convolutions += func in _CONVOLUTIONS
        return func(*args, **(kwargs or {}))


class _Active(threading.local):
    any: bool = False


_active = _Active()


class MultiConv:
    """A context manager whose convolutions may run at the same time on the device.

    The errors of a MultiConv are raised only inside the forward method of a wrapped model.

    Raises:
        Error: The MultiConv is inside another MultiConv, it contains no convolution, or a list of
            values for a setting does not have one value for each convolution.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._counter: _Counter | None = None

    def availableMemoryProportions(self, value: float | list[float]) -> MultiConv:
        """Set the proportion of each tile's memory that a convolution may use.

        Args:
            value: One memory proportion for all convolutions, or a list with a memory proportion
                for each convolution.

        Raises:
            AssertionError: ``value`` is neither a float from 0 to 1 nor a list of such floats.
        """
        valid = all(isinstance(one, float) and 0.0 <= one <= 1.0 for one in _as_list(value, float))
        assert valid, (
            f"MultiConv.availableMemoryProportions({value!r}) is not valid: expected a float from "
            "0.0 to 1.0, or a list of such floats"
        )
        return self._set("availableMemoryProportions", value)

    def partialsTypes(self, value: torch.dtype | list[torch.dtype]) -> MultiConv:
        """Set the dtype of the partial sums of the convolutions.

        Args:
            value: torch.float or torch.half for all convolutions, or a list with a dtype for each
                convolution.

        Raises:
            ValueError: A dtype is neither torch.float nor torch.half.
        """
        if not all(one in (torch.float, torch.half) for one in _as_list(value, torch.dtype)):
            raise ValueError(
                f"MultiConv.partialsTypes({value!r}) is not valid: expected torch.float or "
                "torch.half, or a list of these types"
            )
        return self._set("partialsTypes", value)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Set whether the device plans the convolutions to run in parallel or one after another.

        Args:
            value: The plan type, a ``MultiConvPlanType``; None to use the device's default.

        Raises:
            AssertionError: ``value`` is not None and not a MultiConvPlanType.
        """
        assert value is None or isinstance(value, MultiConvPlanType), (
            f"MultiConv.planType({value!r}) is not valid: expected a poptorch.MultiConvPlanType "
            "or None"
        )
        return self._set("planType", value)

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles that the device reserves for each convolution."""
        assert isinstance(value, int), (
            f"MultiConv.perConvReservedTiles({value!r}) is not valid: expected an int"
        )
        return self._set("perConvReservedTiles", value)

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set how much slower than the fastest plan a convolution's plan may be."""
        assert isinstance(value, float), (
            f"MultiConv.cycleBackOff({value!r}) is not valid: expected a float"
        )
        return self._set("cycleBackOff", value)

    def enableConvDithering(self, value: bool | list[bool]) -> MultiConv:
        """Set whether the tensor layouts of different convolutions begin at different tiles.

        Args:
            value: One bool for all convolutions, or a list with a bool for each convolution.

        Raises:
            ValueError: ``value`` is neither a bool nor a list of bools.
        """
        if not all(isinstance(one, bool) for one in _as_list(value, bool)):
            raise ValueError(
                f"MultiConv.enableConvDithering({value!r}) is not valid: expected a bool or a "
                "list of bools"
            )
        return self._set("enableConvDithering", value)

    def _set(self, name: str, value: Any) -> MultiConv:
        self._settings[name] = value
        return self

    def __enter__(self) -> MultiConv:
        if current_forward.is_running():
            if _active.any:
                raise Error(
                    "Nested poptorch.MultiConv is not supported: end the outer MultiConv before "
                    "the next one begins"
                )
            self._record_settings()
            _active.any = True
            self._counter = _Counter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _record_settings(self) -> None:
        """Record the names of the settings that have no effect, for a warning of the compiler."""
        blocks = current_blocks()
        if blocks is not None:
            blocks.use_idle_settings(
                f"MultiConv.{name}" for name, value in self._settings.items() if value is not None
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        _active.any = False
        if kind is None:
            self._check(counter.convolutions)

    def _check(self, convolutions: int) -> None:
        if not convolutions:
            raise Error("Unexpected end_multi_conv: the poptorch.MultiConv contains no convolution")
        for name, value in self._settings.items():
            if isinstance(value, (list, tuple)) and len(value) != convolutions:
                raise Error(
                    f"The MultiConv contains {counted(convolutions, 'convolution')}, but its "
                    f"setting {name} has {counted(len(value), 'value')}: give one value for all "
                    "convolutions, or one value for each convolution"
                )


def _as_list(value: Any, kind: type) -> list[Any]:
    """Return a setting's values as a list, for one value of the type ``kind`` or for several.

    If ``value`` is neither of the type ``kind`` nor a list or tuple, ``_as_list`` returns [None],
    which is not valid for any setting.
    """
    if isinstance(value, kind):
        return [value]
    return list(value) if isinstance(value, (list, tuple)) else [None]
