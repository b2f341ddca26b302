"""Functions that read and change the ``grad`` attribute of the device's parameters.

Torch stores the sum of a parameter's gradients in the attribute ``grad``. Autograd adds gradients
to the attribute ``grad`` of a parameter, and torch's optimisers read ``grad``. Only the module
``parameter_gradients`` assigns ``grad`` in ``popdist_py.poptorch``.
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
    """Replace the gradients of all parameters, without copying any gradient."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def clear_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the gradients of the parameters."""
    for parameter in parameters:
        parameter.grad = None


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor, *, copies: bool) -> None:
    """Add a gradient to the gradient of a parameter, as autograd does.

    Args:
        parameter: The parameter whose gradient is changed.
        gradient: The tensor to add to the parameter's gradient.
        copies: Whether ``gradient`` is copied if the parameter does not have a ``grad`` yet. With
            False, the tensor ``gradient`` itself becomes ``grad``, and later gradients are added to
            the tensor ``gradient`` in place.
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
    """Replace the gradients of parameters in the ``with`` block, and restore them afterwards.

    The context manager yields the gradients that the parameters had before the ``with`` block.
    """
    before = gradients_of(parameters)
    set_gradients(parameters, gradients)
    try:
        yield before
    finally:
        set_gradients(parameters, before)
