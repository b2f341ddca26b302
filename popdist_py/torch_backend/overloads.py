"""The second signature of a process group's methods: one tensor, and the options as arguments.

``group.broadcast(tensor, root=1)`` is ``group.broadcast([tensor], options)``; programs that call a
group's methods by themselves use both.

Nothing here makes a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["also_with_arguments"]

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def also_with_arguments(
    options: type, *names: str, tensors: int = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method be called in both ways.

    Args:
        options: class of the last argument of the method.
        names: of the arguments that stand in place of it, in their order.
        tensors: number of arguments before it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given, rest = args[:tensors], args[tensors:]
            if "opts" in kwargs:
                rest = (kwargs["opts"],)
            if len(rest) == 1 and (rest[0] is None or isinstance(rest[0], options)):
                return method(self, *given, rest[0])
            values = {**dict(zip(names, rest, strict=False)), **kwargs}
            return method(self, *_as_lists(given), _options(options, values))

        return call

    return decorate


def _options(options: type, values: dict[str, Any]) -> Any:
    """Return options with some values."""
    made = options()
    for name, value in values.items():
        if value is not None:
            setattr(made, _FIELDS[name], value)
    return made


def _as_lists(given: tuple[Any, ...]) -> list[Any]:
    """Return tensors as lists, and lists of tensors beside a tensor as lists of lists."""
    if not any(isinstance(each, torch.Tensor) for each in given):
        return list(given)
    return [[each] for each in given]
