"""The class FlatBuffers, which stores tensors of one dtype next to each other in one buffer.

Each tensor stored in a FlatBuffers object is a view of the buffer of its dtype. Other modules sum
the gradients or update the weights that the flat buffers contain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from popdist_py.poptorch.weights.parameter_gradients import gradients_of, set_gradients

__all__ = ["FlatBuffers", "element_counts"]


class FlatBuffers:
    """A flat (one-dimensional) buffer for each dtype, and for every tensor a view of the buffer.

    Args:
        tensors: The tensors to store. The views have the shapes and dtypes of ``tensors``, but the
            numbers in ``tensors`` are not copied.
        buffers: The memory for the tensors, as one flat tensor for each dtype. By default, the
            constructor of ``FlatBuffers`` allocates the memory.

    Attributes:
        buffers: The flat (one-dimensional) tensor of each dtype.
        views: The views of the buffers, in the order of ``tensors``.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        buffers: Mapping[torch.dtype, torch.Tensor] | None = None,
    ) -> None:
        sizes = element_counts(tensors)
        self.buffers = buffers or {d: torch.zeros(size, dtype=d) for d, size in sizes.items()}
        offsets = dict.fromkeys(sizes, 0)
        self.views: list[torch.Tensor] = []
        for tensor in tensors:
            start = offsets[tensor.dtype]
            offsets[tensor.dtype] = start + tensor.numel()
            flat = self.buffers[tensor.dtype][start : offsets[tensor.dtype]]
            self.views.append(flat.view(tensor.shape))

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the numbers in ``tensors`` into the views of the flat buffers."""
        if self.views:
            torch._foreach_copy_(self.views, list(tensors))

    @torch.no_grad()
    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of ``parameters`` into the views, and make these views the gradients.

        A gradient that is already stored in its view is not copied.
        """
        gradients = gradients_of(parameters)
        arrived = [
            (parameter, gradient, view)
            for parameter, gradient, view in zip(parameters, gradients, self.views, strict=True)
            if gradient is not None and gradient is not view
        ]
        if arrived:
            moved, given, views = zip(*arrived, strict=True)
            torch._foreach_copy_(views, given)
            set_gradients(moved, views)

    @torch.no_grad()
    def complete(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do the same as :meth:`take`, and replace each missing gradient by a view with zeros."""
        self.take(parameters)
        missing = [
            (parameter, view.zero_())
            for parameter, gradient, view in zip(
                parameters, gradients_of(parameters), self.views, strict=True
            )
            if gradient is None
        ]
        if missing:
            set_gradients(*zip(*missing, strict=True))

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The buffers as NumPy arrays, which share memory with ``buffers``."""
        return [buffer.numpy() for buffer in self.buffers.values()]


def element_counts(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return the total number of elements of the tensors of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return sizes
