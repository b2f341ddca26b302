"""A torch dispatch mode that raises errors for invalid operations, overflow and division by zero.

An IPU checks each instruction for floating-point exceptions. The mode ``FloatingPointTraps`` checks
each torch operation after the operation has run. ``FloatingPointTraps`` checks the results of the
operation and the tensors that the operation wrote, such as weights and running statistics. An
operation may return NaN or infinity if its arguments already contain NaN or infinity. For example,
attention masks contain infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from popdist_py.poptorch.calls.nested_values import tensors_of
from popdist_py.poptorch.errors import Error

__all__ = ["FloatingPointTraps"]

_COMPARISONS: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum"})
# Operations that are not checked, because they return uninitialised memory, copy numbers without a
# change, or test numbers for NaN and infinity.
_UNCHECKED: Final = frozenset(
    {
        *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
        *("detach", "alias", "view", "_unsafe_view", "expand", "clone", "t", "transpose"),
        *("permute", "select", "slice", "as_strided", "squeeze", "unsqueeze", "split", "zero_"),
        *("isnan", "isinf", "isfinite"),
    }
)
_CONVERSIONS: Final = frozenset({"_to_copy", "copy_", "_foreach_copy_"})
# Arguments that batch norm changes, although torch's schema does not mark the arguments as written.
_STATISTICS: Final = frozenset({"running_mean", "running_var"})

# A pair of the name of an operation's argument and a tensor that the argument contains.
Named = tuple[str, torch.Tensor]


class FloatingPointTraps(TorchDispatchMode):
    """A dispatch mode that raises Error for invalid operations, division by zero and overflow."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch operation, and check its results and the tensors that it wrote."""
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if name in _UNCHECKED:
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        # If a conversion between dtypes overwrites a tensor, the old numbers of the tensor are not
        # checked. A conversion does not read the numbers that it overwrites, so the old numbers may
        # be uninitialised memory.
        before = [] if name in _CONVERSIONS else [tensor for _, tensor in written]
        were_bad = list(map(_is_bad, before)) or [False] * len(written)
        had_nan = any(map(_has_nan, before))
        result = func(*args, **kwargs)
        values = [*args, *kwargs.values()]
        if name in _COMPARISONS and any(map(_has_nan, tensors_of(values))):
            raise Error(
                f"Floating point exception: the operation {name} compares a tensor with NaN"
            )
        own = {id(tensor) for _, tensor in written}
        made = [("", tensor) for tensor in tensors_of(result) if id(tensor) not in own]
        made += [pair for pair, was_bad in zip(written, were_bad, strict=True) if not was_bad]
        bad = [(argument, tensor) for argument, tensor in made if _is_bad(tensor)]
        if bad:
            read = [tensor for tensor in tensors_of(values) if id(tensor) not in own]
            _check_new(
                _described(name, bad[0]),
                bad=[tensor for _, tensor in bad],
                had_nan=had_nan or any(map(_has_nan, read)) or _has(values, math.isnan),
                # An optimiser step writes weights and optimiser state. Every infinity in weights or
                # optimiser state is an overflow, even if a gradient was infinite before.
                had_infinity=not _is_update(name)
                and (any(were_bad) or any(map(_is_bad, read)) or _has(values, math.isinf)),
            )
        return result


def _check_new(
    where: str, *, bad: Sequence[torch.Tensor], had_nan: bool, had_infinity: bool
) -> None:
    """Raise an Error for NaN or infinities that an operation's arguments did not contain.

    Args:
        where: The words for the operation in the error message, such as "a conversion to float16".
        bad: The tensors that contain NaN or infinities after the operation.
        had_nan: Whether an argument of the operation contained NaN before the operation ran.
        had_infinity: Whether an argument of the operation contained infinity before the operation
            ran.
    """
    if had_nan:
        return
    if any(map(_has_nan, bad)):
        raise Error(f"Floating point exception: invalid operation (a result is NaN) in {where}")
    if not had_infinity:
        raise Error(
            "Floating point exception: division by zero or overflow (a result is infinite) in "
            f"{where}"
        )


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Named]:
    """Yield the floating-point tensors that an operation writes, with their argument names."""
    for number, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in _STATISTICS:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from ((argument.name, t) for t in tensors_of(value) if t.is_floating_point())


def _is_update(name: str) -> bool:
    return name.startswith(("_foreach_", "_fused_")) and name not in _CONVERSIONS


def _described(name: str, bad: Named) -> str:
    """Return the words that name an operation in the error message.

    Args:
        name: The name of the operation.
        bad: A tensor that the operation wrote, with the name of the operation's argument.
    """
    argument, tensor = bad
    if name in _CONVERSIONS:
        return f"a conversion to {str(tensor.dtype).removeprefix('torch.')}"
    return f"{argument} of {name}" if argument in _STATISTICS else name.strip("_")


def _has(values: Sequence[Any], test: Any) -> bool:
    """Tell whether the function ``test`` returns True for any Python float in the arguments."""
    return any(isinstance(value, float) and test(value) for value in values)


def _is_bad(value: torch.Tensor) -> bool:
    return value.is_floating_point() and not bool(torch.isfinite(value).all())


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(torch.isnan(value).any())
