"""What was given under one name so far, and how two of them become one. Pure values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["Accumulated", "Reduction", "merged", "one_number"]

Reduction: TypeAlias = Literal["mean", "sum", "min", "max", "last"]


class Accumulated(NamedTuple):
    """All that was given under one name.

    Attributes:
        reduction: what the numbers become.
        value: for ``mean`` the sum of value x weight, else the result so far.
        weight: the sum of the weights, above 0; only ``mean`` needs it.
    """

    reduction: str
    value: float
    weight: float

    @classmethod
    def of(cls, reduction: str, value: float, weight: float) -> Accumulated:
        """Return what one number amounts to."""
        return cls(reduction, value * weight if reduction == "mean" else value, weight)

    def followed_by(self, later: Accumulated) -> Accumulated:
        """Return both in one; a NaN in either stays."""
        return Accumulated(
            self.reduction,
            _COMBINE[self.reduction](self.value, later.value),
            self.weight + later.weight,
        )

    @property
    def result(self) -> float:
        """The number that is logged."""
        return self.value / self.weight if self.reduction == "mean" else self.value


_COMBINE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    # Python's min() keeps or drops a NaN, depending on where it stands.
    "min": lambda a, b: a if a < b or math.isnan(a) else b,
    "max": lambda a, b: a if a > b or math.isnan(a) else b,
    "last": lambda _, b: b,
}


def merged(parts: Iterable[Accumulated]) -> Accumulated:
    """Return the whole of several instances' parts, in instance order: the first has the last word.

    Sums are added in the order of the parts, so that all instances get the same bits.
    """
    return reduce(Accumulated.followed_by, reversed(list(parts)))


def one_number(value: Any, reduction: str) -> Any:
    """Return ``value`` as a float; None if it is an array or tensor without elements.

    Elements of an array or tensor are reduced to their sum, minimum, maximum, or else their mean. A
    tensor on another device than the CPU stays there, as a tensor of one element: reading it would
    wait for the device.

    Raises:
        TypeError: it is no number, array or tensor, or holds something else than real numbers.
        ValueError: it is a whole number that no float holds.
    """
    if type(value) in (float, int, bool):
        return _as_float(value)
    shape = getattr(value, "shape", None)
    if shape is None:
        if not hasattr(value, "__float__"):
            raise TypeError("expected a number, an array or a tensor")
        return _as_float(value)
    if 0 in shape:
        return None
    dtype = getattr(value, "dtype", None)
    # Converted to floats, the first would lose its imaginary part, and None would become a NaN.
    if getattr(dtype, "is_complex", False) or getattr(dtype, "kind", "") in ("c", "O"):
        raise TypeError(f"expected real numbers, not {dtype}")
    is_remote = False
    if hasattr(value, "detach"):
        if str(value.layout) != "torch.strided":
            raise TypeError(f"expected a dense tensor, not {value.layout}")
        value = value.detach()
        is_remote = value.device.type != "cpu"
        value = value.float() if is_remote else value.double()
    elif dtype is not None:
        value = value.astype(float)
    value = getattr(value, reduction if reduction in ("sum", "min", "max") else "mean")()
    return value if is_remote else float(value)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError("it is too large for a float") from None
