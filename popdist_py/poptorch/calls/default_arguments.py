"""Default values for the parameters of a forward method that a call leaves out.

If a default value is a tensor, it usually becomes an input of the compiled model. Some calls of the
model may therefore pass a tensor for the parameter, and other calls may leave the parameter out.
The module ``call_signature`` compares the arguments of different calls of a model.
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
    """The default values that complete the arguments of a model call.

    Attributes:
        values: The default values that are tensors or None, by the name of the parameter.
        names: The names of the first positional parameter whose default is a tensor, and of all
            later positional parameters. The forward method gets the arguments for the parameters in
            ``names`` by keyword, even if the caller passes them by position.
        first: The index, among the forward method's parameters, of the first parameter in
            ``names``.
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
        """Return the default values that complete a model's calls, computed from the first call.

        Args:
            signature: The signature of the model's forward method.
            args: The positional arguments of the first call.
            kwargs: The keyword arguments of the first call.
            num_slices: The number of micro-batches into which each input is cut. Default tensors
                are repeated along dimension 0, so that each micro-batch contains the whole default.
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
        """Return a call's arguments, completed by default values for the omitted parameters."""
        if self.first < len(args) <= self.first + len(self.names):
            by_position = dict(zip(self.names, args[self.first :], strict=False))
            if by_position.keys() & kwargs.keys():
                # The call passes one parameter twice, by position and by keyword. The module
                # ``call_signature`` raises an error for a call that passes one parameter twice.
                return args, kwargs
            args, kwargs = args[: self.first], {**by_position, **kwargs}
        return args, {**self.values, **kwargs} if self.values else kwargs


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _by_keyword(parameters: Sequence[inspect.Parameter], count: int) -> tuple[tuple[str, ...], int]:
    """Return ``Defaults.names`` and ``.first`` for a call with ``count`` positional arguments."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for first, parameter in enumerate(parameters):
        if parameter.kind == plain and isinstance(parameter.default, torch.Tensor):
            names = tuple(p.name for p in parameters[first:] if p.kind == plain)
            # If a call passes values for ``*args``, it must pass all parameters before ``*args`` by
            # position.
            return (names, first) if count <= first + len(names) else ((), 0)
    return (), 0


def _as_input(default: torch.Tensor, given: Any, num_slices: int) -> torch.Tensor | None:
    """Return the input tensor for a default value, or None if the value stays a constant.

    A complex tensor, a tensor without elements and a 0-d tensor cannot be inputs of a model. If the
    first call leaves out the parameter, a default value that cannot be an input stays a constant of
    the model.

    Args:
        default: The default value of the parameter.
        given: The argument that the first call passes for the parameter; None if the call leaves it
            out.
        num_slices: The number of micro-batches into which each input is cut.
    """
    default = default.detach()
    cannot_be_cut = default.dim() == 0 or default.numel() == 0
    if given is None and (cannot_be_cut or default.is_complex()):
        return None
    is_whole = isinstance(given, torch.Tensor) and given.shape == default.shape
    if num_slices == 1 or is_whole or default.dim() == 0:
        return default
    return default.repeat(num_slices, *[1] * (default.dim() - 1))
