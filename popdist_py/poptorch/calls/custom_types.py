"""Arguments of a type of the user's own: how to take the tensors out and put them back in.

The registry only; wrappers and the data accessor look types up here.
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
    """How to take a type apart into tensors and build it again; override both methods."""

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of ``struct``, always in the same order."""
        raise NotImplementedError(f"{type(self).__name__} must define yieldTensors")

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build a structure like ``original_structure`` from tensors in the order yielded."""
        raise NotImplementedError(f"{type(self).__name__} must define reconstruct")


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(typename: type, parser: ICustomArgParser | None) -> None:
    """Use ``parser`` for arguments of class ``typename`` and its subclasses; None removes it.

    Raises:
        Error: the parser does not derive from ICustomArgParser.
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
    """Return the parser of the nearest registered class of ``value``, or None."""
    if not _parsers:
        return None
    return next((_parsers[kind] for kind in type(value).__mro__ if kind in _parsers), None)


def registered() -> dict[type, ICustomArgParser]:
    """Return a copy of the registry, for :func:`restore` in another process."""
    return dict(_parsers)


def restore(parsers: dict[type, ICustomArgParser]) -> None:
    """Add the parsers of another process to this one's."""
    _parsers.update(parsers)


class CarriesParsers:
    """What works with custom types in a process that is started for it: brings the parsers along.

    A worker process that is forked has them already; of any other, the program may have registered
    them where the new process does not look.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parsers": registered()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(state.pop("_parsers"))
        self.__dict__.update(state)
