"""The accumulated value of one metric, and its combination with other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeAlias

Reduction: TypeAlias = Literal["mean", "sum", "min", "max", "last"]


class Accumulated(NamedTuple):
    """The reduction of all numbers that were given for one metric so far.

    Attributes:
        reduction: The name of the reduction, such as ``mean``.
        value: With the reduction ``mean``, the sum of the numbers times their weights. With the
            other reductions, the sum, the minimum, the maximum or the last number.
        weight: The sum of the weights, which is above 0. Only the reduction ``mean`` uses weights.
    """

    reduction: str
    value: float
    weight: float

    @classmethod
    def of(cls, reduction: str, value: float, weight: float) -> Accumulated:
        """Return the accumulated value of a single number."""
        return cls(reduction, value * weight if reduction == "mean" else value, weight)

    def followed_by(self, later: Accumulated) -> Accumulated:
        """Return the combination of this value and a later value.

        With any reduction except ``last``, the result is NaN if one of the two values is NaN.
        """
        return Accumulated(
            self.reduction,
            _COMBINE[self.reduction](self.value, later.value),
            self.weight + later.weight,
        )

    @property
    def result(self) -> float:
        """The number to log."""
        return self.value / self.weight if self.reduction == "mean" else self.value


_COMBINE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    # Python's min() and max() are not used, because their results depend on the position of a NaN.
    "min": lambda a, b: a if a < b or math.isnan(a) else b,
    "max": lambda a, b: a if a > b or math.isnan(a) else b,
    "last": lambda _, b: b,
}


def merged(parts: Iterable[Accumulated]) -> Accumulated:
    """Return the combination of the instances' values, which are given in instance order.

    With the reduction ``last``, the result is the number of the first instance. The order of the
    additions is fixed, so all instances get exactly the same result.
    """
    return reduce(Accumulated.followed_by, reversed(list(parts)))


def one_number(value: Any, reduction: str) -> Any:
    """Return ``value`` as a float, or None if it is an array or tensor without elements.

    If ``reduction`` is sum, min or max, it is applied to the elements of an array or tensor.
    Otherwise the result is the mean of the elements. A tensor on another device than the CPU is
    reduced to a tensor of one element on that device. Reading this element would wait for the
    device.

    Raises:
        TypeError: ``value`` is not a number, array or tensor, or its elements are not real numbers.
        ValueError: ``value`` is a whole number that is too large for a float.
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
    # A conversion of these elements to floats would drop imaginary parts, and would turn None into
    # NaN.
    if getattr(dtype, "is_complex", False) or getattr(dtype, "kind", "") in ("c", "O"):
        raise TypeError(f"expected real numbers, not elements of the type {dtype}")
    is_remote = False
    if hasattr(value, "detach"):
        if str(value.layout) != "torch.strided":
            raise TypeError(f"expected a dense tensor, not a tensor with the layout {value.layout}")
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
        raise ValueError("the number is too large for a float") from None
