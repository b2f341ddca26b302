"""Functions that read and change the ``grad`` attribute of the device's parameters.

Torch stores the sum of a parameter's gradients in the attribute ``grad``. Autograd adds to this
attribute, and torch's optimisers read it. No other module of ``popdist_py.poptorch`` assigns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = [
    "add_gradient",
    "clear_gradients",
    "gradients_of",
    "gradients_replaced",
    "set_gradients",
]


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter; None for a parameter without a gradient."""
    return [parameter.grad for parameter in parameters]


def set_gradients(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Replace the gradients of all parameters, without copies."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def clear_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the gradients of the parameters."""
    for parameter in parameters:
        parameter.grad = None


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor, *, copies: bool) -> None:
    """Add a gradient to the gradient of a parameter, as autograd does.

    Args:
        parameter: The parameter.
        gradient: The tensor to add.
        copies: Whether the first gradient of a parameter is copied. Otherwise the tensor itself
            becomes the parameter's ``grad``, and later gradients are added to it in place.
    """
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif copies:
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
    else:
        parameter.grad = gradient


@contextmanager
def gradients_replaced(
    parameters: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> Iterator[list[torch.Tensor | None]]:
    """Replace the gradients of parameters in the ``with`` block, and restore them at its end.

    The ``with`` statement returns the gradients before the block.
    """
    before = gradients_of(parameters)
    set_gradients(parameters, gradients)
    try:
        yield before
    finally:
        set_gradients(parameters, before)
