"""The class FlatBuffers, which stores tensors of one dtype next to each other in one buffer.

Each tensor is a view of the buffer. The callers sum or update the contents of the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["FlatBuffers", "element_counts"]


class FlatBuffers:
    """One flat buffer for each dtype, and for every tensor a view of the buffer of its dtype.

    Args:
        tensors: The tensors whose shapes and dtypes the views get.
        buffers: The memory, as one flat tensor for each dtype. By default, the constructor
            allocates the memory.

    Attributes:
        buffers: The flat tensor of each dtype.
        views: The views, in the order of ``tensors``.
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
        """Copy the tensors into the views."""
        if self.views:
            torch._foreach_copy_(self.views, list(tensors))

    @torch.no_grad()
    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move the gradients of ``parameters`` into the views.

        A gradient that already is the view of its parameter is not copied.
        """
        arrived = [
            (parameter, parameter.grad, view)
            for parameter, view in zip(parameters, self.views, strict=True)
            if parameter.grad is not None and parameter.grad is not view
        ]
        if arrived:
            torch._foreach_copy_([view for *_, view in arrived], [grad for _, grad, _ in arrived])
        for parameter, _, view in arrived:
            parameter.grad = view

    @torch.no_grad()
    def complete(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move the gradients of ``parameters`` into the views; a missing gradient becomes zeros."""
        self.take(parameters)
        for parameter, view in zip(parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The buffers as NumPy arrays, which share memory with ``buffers``."""
        return [buffer.numpy() for buffer in self.buffers.values()]


def element_counts(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return the number of elements of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return sizes
