"""Custom operations: what a program adds to the device, here as functions in Python.

On hardware an operation comes from a compiled library; the emulation runs the Python function
registered under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.tracing import current_forward
from popdist_py.poptorch.tracing.block_recorder import on_host

__all__ = ["custom_op", "registerCustomOp"]

_registry: dict[tuple[str, str], Callable[..., Any]] = {}


def registerCustomOp(name: str, domain: str, function: Callable[..., Any]) -> None:
    """Give the emulation the function to run for a custom operation (not part of PopTorch).

    Args:
        name: the operation's name.
        domain: its domain.
        function: takes the input tensors as positional and the attributes as keyword arguments;
            returns a tensor or a sequence of tensors. Differentiable where gradients are needed.
    """
    _registry[domain, name] = function


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[torch.Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Apply a custom operation.

    Args:
        inputs: its input tensors.
        name: its name.
        domain: the domain of the name.
        domain_version: version of the domain.
        example_outputs: tensors with the outputs' shapes and dtypes.
        attributes: constants, by name: float, int, str, or a list or tuple of one of these.

    Returns:
        As many tensors as there are examples; outside of wrapped models, copies of the examples.

    Raises:
        ValueError: an attribute that cannot be passed on.
        Error: no function is registered, or its results differ from the examples.
    """
    attributes = _checked(attributes)
    if not current_forward.is_running():
        return [example.clone() for example in example_outputs]
    function = _registry.get((domain, name))
    if function is None:
        raise Error(
            f"custom operation {name!r} of domain {domain!r} (version {domain_version}) has no "
            "Python function: the emulation cannot run compiled device code. Register one with "
            f"poptorch.registerCustomOp({name!r}, {domain!r}, function)"
        )
    with on_host():  # it may do whatever it likes
        results = function(*inputs, **attributes)
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    expected = [(tuple(example.shape), example.dtype) for example in example_outputs]
    got = [(tuple(output.shape), output.dtype) for output in outputs]
    if got != expected:
        raise Error(
            f"custom operation {name!r} returned {got}, its example_outputs promise {expected}"
        )
    return outputs


def _checked(attributes: dict[str, Any] | None) -> dict[str, Any]:
    for key, value in (attributes or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"attribute keys must be strings, got {key!r}")
        values = value if isinstance(value, (list, tuple)) else [value]
        for one in values:
            if not isinstance(one, (float, int, str)):
                raise ValueError(
                    f"attribute {key!r} is {one!r}: expected float, int, str, or a list or tuple "
                    "of these"
                )
        if len({type(one) for one in values}) > 1:
            raise ValueError(f"attribute {key!r} mixes types: {value!r}; use one type in a list")
        for text in (key, *values):
            if isinstance(text, str) and not text.isascii():
                raise ValueError(f"attribute {key!r} contains non-ASCII characters: {text!r}")
    return dict(attributes or {})
