"""The registry of parsers for a program's custom argument types.

A parser extracts the tensors from an argument of a custom type, and rebuilds the argument from
other tensors. The model wrappers and the data loader call ``parser_of`` to find the parser of a
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from popdist_py.poptorch.errors import Error

__all__ = [
    "CarriesParsers",
    "ICustomArgParser",
    "parser_of",
    "registerCustomArgParser",
    "registered",
    "restore",
]


class ICustomArgParser:
    """Base class of parsers, which extract the tensors from a custom-type value or replace them.

    Each subclass of ``ICustomArgParser`` must override the methods ``yieldTensors`` and
    ``reconstruct``.
    """

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor in the custom-type value ``struct``, always in the same order."""
        raise NotImplementedError(
            f"{type(self).__name__} must define the method yieldTensors(), which yields the "
            "tensors of a value"
        )

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build a custom-type value like ``original_structure`` from other tensors.

        The iterator ``tensor_iterator`` returns the other tensors in the same order as
        ``yieldTensors``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define the method reconstruct(), which builds a value "
            "from tensors"
        )


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(typename: type, parser: ICustomArgParser | None) -> None:
    """Register ``parser`` for arguments of the class ``typename`` and of its subclasses.

    Args:
        typename: The class of the arguments (the class object, not a text with its name).
        parser: The parser to register. If ``parser`` is None, the parser of the class ``typename``
            is removed.

    Raises:
        Error: The argument ``parser`` is neither None nor an ``ICustomArgParser``.
    """
    if parser is None:
        _parsers.pop(typename, None)
    elif isinstance(parser, ICustomArgParser):
        _parsers[typename] = parser
    else:
        raise Error(
            f"{type(parser).__name__} must inherit from poptorch.ICustomArgParser to be the "
            f"parser of {typename.__name__}"
        )


def parser_of(value: object) -> ICustomArgParser | None:
    """Return the registered parser for the type of ``value``, or None without such a parser.

    The type of ``value`` and its base classes are tried in the method resolution order.
    """
    if not _parsers:
        return None
    return next((_parsers[kind] for kind in type(value).__mro__ if kind in _parsers), None)


def registered() -> dict[type, ICustomArgParser]:
    """Return the registered parsers of custom types, for :func:`restore` in another process."""
    return dict(_parsers)


def restore(parsers: dict[type, ICustomArgParser]) -> None:
    """Register the parsers of custom types that ``registered()`` returned in another process."""
    _parsers.update(parsers)


class CarriesParsers:
    """Base class of objects whose pickled form contains the registered parsers of custom types.

    The subclasses of ``CarriesParsers`` handle values of custom types in a data loader's worker
    processes. A worker process that is started with the method fork inherits the registered
    parsers. A worker process that is started with the method spawn may lack the parsers, because it
    does not run all of the program's code.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parsers": registered()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(state.pop("_parsers"))
        self.__dict__.update(state)
