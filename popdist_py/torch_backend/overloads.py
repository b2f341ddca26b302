"""The second signature of a process group's methods, with each option as a separate argument.

For example, ``group.broadcast(tensor, root=1)`` and ``group.broadcast([tensor], options)`` mean the
same. Programs that call the methods of a process group directly use either form.
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
    """Return a decorator that lets a method accept its options as separate arguments, too.

    Args:
        options: Class of the options object, which is the last argument of the method.
        names: Names of the separate arguments, in the order in which programs pass them.
        tensors: Number of the method's arguments that come before the options.
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
    """Return an object of the class ``options`` that contains the given values."""
    made = options()
    for name, value in values.items():
        if value is not None:
            setattr(made, _FIELDS[name], value)
    return made


def _as_lists(given: tuple[Any, ...]) -> list[Any]:
    """If any argument is a tensor, wrap each argument in a list."""
    if not any(isinstance(each, torch.Tensor) for each in given):
        return list(given)
    return [[each] for each in given]
