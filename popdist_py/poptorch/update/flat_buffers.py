"""Flat buffers: tensors of one dtype side by side in one piece of memory, with a view for each.

Knows tensors and memory only; what is summed or updated in the buffers is the callers'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["FlatBuffers", "element_counts"]


class FlatBuffers:
    """One flat buffer per dtype, and a view of it for every tensor.

    Args:
        tensors: what the views look like.
        buffers: the memory, one flat tensor for each dtype; made here by default.
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
        """Copy the tensors in."""
        if self.views:
            torch._foreach_copy_(self.views, list(tensors))

    @torch.no_grad()
    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move the gradients of ``parameters`` in; those that live here already stay."""
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
        """Move the gradients in, and zeros for parameters that have none."""
        self.take(parameters)
        for parameter, view in zip(parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The buffers as arrays that share their memory."""
        return [buffer.numpy() for buffer in self.buffers.values()]


def element_counts(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return the number of elements of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return sizes
