"""Custom operations, which a program adds to the emulated device as Python functions.

On hardware, the code of a custom operation comes from a compiled library. The emulation runs the
Python function that the program has registered under the name of the operation.
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
    """Register the Python function that emulated IPUs run for a custom operation.

    Graphcore's PopTorch does not have the function ``registerCustomOp``.

    Args:
        name: The name of the operation.
        domain: The domain (namespace) of the operation's name.
        function: The Python function that computes the outputs of the custom operation. The
            positional arguments of the registered function are the input tensors, and the keyword
            arguments are the attributes of the operation. The registered function returns a tensor
            or a sequence of tensors. For training, autograd must be able to differentiate the
            registered function.
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
    """Apply a custom operation to tensors.

    Args:
        inputs: The input tensors of the operation.
        name: The name of the operation.
        domain: The domain (namespace) of the operation's name.
        domain_version: The version of the domain of operations.
        example_outputs: Example tensors with the shapes and dtypes of the outputs.
        attributes: The attributes of the operation, by name. Each attribute is a float, int or str,
            or a list or tuple of elements of one of these types.

    Returns:
        One output tensor for each example tensor. Outside the forward method of a wrapped
        model, the output tensors are copies of the example tensors.

    Raises:
        ValueError: The name or the value of an attribute is not supported.
        Error: No function is registered for the operation, or the shapes or dtypes of its results
            differ from ``example_outputs``.
    """
    attributes = _checked(attributes)
    if not current_forward.is_running():
        return [example.clone() for example in example_outputs]
    function = _registry.get((domain, name))
    if function is None:
        raise Error(
            f"The custom operation {name!r} of the domain {domain!r} (version {domain_version}) "
            "has no Python function, and the emulation cannot run compiled device code. Register "
            f"a Python function with poptorch.registerCustomOp({name!r}, {domain!r}, function)"
        )
    # A registered function may use operations that an IPU does not support.
    with on_host():
        results = function(*inputs, **attributes)
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    expected = [(tuple(example.shape), example.dtype) for example in example_outputs]
    got = [(tuple(output.shape), output.dtype) for output in outputs]
    if got != expected:
        raise Error(
            f"The custom operation {name!r} returned tensors of the shapes and types {got}, but "
            f"the tensors in example_outputs have {expected}"
        )
    return outputs


def _checked(attributes: dict[str, Any] | None) -> dict[str, Any]:
    for key, value in (attributes or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"custom_op: the names of attributes must be strings, got {key!r}")
        values = value if isinstance(value, (list, tuple)) else [value]
        for one in values:
            if not isinstance(one, (float, int, str)):
                raise ValueError(
                    f"custom_op: the attribute {key!r} has the value {one!r}: expected a float, "
                    "an int, a str, or a list or tuple of these types"
                )
        if len({type(one) for one in values}) > 1:
            raise ValueError(
                f"custom_op: the attribute {key!r} has values of different types: {value!r}. Use "
                "one type in a list"
            )
        for text in (key, *values):
            if isinstance(text, str) and not text.isascii():
                raise ValueError(
                    f"custom_op: the attribute {key!r} contains non-ASCII characters: {text!r}"
                )
    return dict(attributes or {})
