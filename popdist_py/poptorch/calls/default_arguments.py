"""What a call gives for the parameters of a forward that it leaves out.

A default that is a tensor is an input like any other: one call may give it and the next may not.
Nothing here compares calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Defaults"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The defaults that take part in a call.

    Attributes:
        values: tensors and None, by the name of the parameter.
        names: the parameters that are passed by keyword however a call gives them: from the first
            one with a tensor as default on.
        first: position of the first of these.
    """

    values: Mapping[str, Any]
    names: tuple[str, ...]
    first: int

    @classmethod
    def of(
        cls,
        signature: inspect.Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_slices: int,
    ) -> Defaults:
        """Return the defaults of a first call with these arguments.

        Args:
            signature: of the forward.
            args: the positional arguments.
            kwargs: the keyword arguments.
            num_slices: slices that every input is cut into; a forward sees a default whole.
        """
        parameters = list(signature.parameters.values())
        names, first = _by_keyword(parameters, len(args))
        given = {p.name: value for p, value in zip(parameters, args, strict=False)}
        given.update(kwargs)
        values: dict[str, Any] = {}
        for parameter in parameters:
            name, default = parameter.name, parameter.default
            by_position = name in given and name not in kwargs and name not in names
            if by_position or parameter.kind not in _NAMED:
                continue
            if default is None:
                values[name] = None
            elif isinstance(default, torch.Tensor):
                value = _as_input(default, given.get(name), num_slices)
                if value is not None:
                    values[name] = value
        return cls(values, names, first)

    def completed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of a call with the defaults of those that it leaves out."""
        if self.first < len(args) <= self.first + len(self.names):
            by_position = dict(zip(self.names, args[self.first :], strict=False))
            if by_position.keys() & kwargs.keys():
                return args, kwargs  # given twice: no call fits these
            args, kwargs = args[: self.first], {**by_position, **kwargs}
        return args, {**self.values, **kwargs} if self.values else kwargs


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _by_keyword(parameters: Sequence[inspect.Parameter], count: int) -> tuple[tuple[str, ...], int]:
    """Return the names of ``Defaults.names``, and the position of the first, for so many args."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for first, parameter in enumerate(parameters):
        if parameter.kind == plain and isinstance(parameter.default, torch.Tensor):
            names = tuple(p.name for p in parameters[first:] if p.kind == plain)
            # Variadic arguments leave no choice but to give those before them by position too.
            return (names, first) if count <= first + len(names) else ((), 0)
    return (), 0


def _as_input(default: torch.Tensor, given: Any, num_slices: int) -> torch.Tensor | None:
    """Return what a call gives instead of ``given``; None if the default stays a constant.

    One that the first call leaves out stays one where it cannot be an input: it is complex, has no
    elements, or no dimension along which inputs are cut.
    """
    default = default.detach()
    cannot_be_cut = default.dim() == 0 or default.numel() == 0
    if given is None and (cannot_be_cut or default.is_complex()):
        return None
    is_whole = isinstance(given, torch.Tensor) and given.shape == default.shape
    if num_slices == 1 or is_whole or default.dim() == 0:
        return default
    return default.repeat(num_slices, *[1] * (default.dim() - 1))
