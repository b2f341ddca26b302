"""From the gradients of the local replicas to those of all replicas of all instances.

With several instances the gradients of one dtype live in one flat buffer, in memory that the
instances of a host share, so that the reduction is one call without copies; with one instance
nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from popdist_py.collectives import Communicator
from popdist_py.poptorch.update.gradient_buckets import Buckets, Trial

__all__ = ["FlatBuffers", "Gradients", "SharedGradients", "TreeGradients", "element_counts"]


# A gradient of this size is worth a call of its own when it leaves the cache.
_LARGE_BYTES = 1 << 20


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


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _tell(listener: weakref.WeakMethod[Any], index: int, _: torch.Tensor) -> None:
    arrived = listener()
    if arrived is not None:
        arrived(index)


def element_counts(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return the number of elements of each dtype."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return sizes


def _memory(
    tensors: Sequence[torch.Tensor], communicator: Communicator, rows: int
) -> dict[torch.dtype, torch.Tensor]:
    """Return room for ``rows`` copies of the tensors, [rows, elements] for each dtype.

    It is where the communicator reduces fastest: memory shared with the host's other instances.
    """
    return {
        dtype: torch.from_numpy(communicator.gradient_buffer(rows * size * dtype.itemsize))
        .view(dtype)
        .view(rows, size)
        for dtype, size in element_counts(tensors).items()
    }


class Gradients(Protocol):
    """What happens to gradients during one accumulation window."""

    def begin(self) -> None:
        """Start a window: no parameter has a gradient."""

    def enter(self, replica: int) -> None:
        """Let the next backward add to the gradients of one local replica."""

    def arrived(self, index: int) -> None:
        """Take note that a backward has added to the gradient of a parameter, while it runs."""

    def leave(self, replica: int) -> None:
        """End what ``enter`` began."""

    def finish(self) -> None:
        """Leave in every parameter's ``grad`` the sum over all replicas of all instances."""


class SharedGradients:
    """All local replicas add to the same gradients; instances are reduced in any order.

    Args:
        parameters: whose gradients they are.
        communicator: the other instances.
        overlap: whether reducing begins while backward runs; None: what measures faster between
            hosts, and no within one host.
        slices_only: whether each instance needs no more than the slice that it updates.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        communicator: Communicator,
        overlap: bool | None = None,
        *,
        slices_only: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._communicator = communicator
        self._slices = communicator.host_memory if slices_only else None
        self._flat: FlatBuffers | None = None
        self._buckets: Buckets | None = None
        if overlap is None and not communicator.spans_hosts:
            overlap = False
        self._trial = Trial(self._largest, overlap)
        if communicator.num_instances > 1:
            memory = _memory(self._parameters, communicator, 1)
            self._flat = FlatBuffers(self._parameters, {d: rows[0] for d, rows in memory.items()})
            if overlap is not False:
                self._buckets = Buckets(self._flat.views, communicator)
            self._listen()

    def _listen(self) -> None:
        """Hear of gradients while autograd's backward runs."""
        listener = weakref.WeakMethod(self.arrived)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, listener, index))
            for index, (parameter, view) in enumerate(
                zip(self._parameters, self.views, strict=True)
            )
            if self._buckets is not None or view.nbytes >= _LARGE_BYTES
        ]
        # Parameters outlive their optimiser, and must not keep its buffers alive.
        weakref.finalize(self, _remove, handles)

    @torch.no_grad()
    def arrived(self, index: int) -> None:
        """Move a gradient to where it is reduced while it is in the cache; begin to reduce it."""
        if self._flat is None:
            return
        parameter, view = self._parameters[index], self._flat.views[index]
        if view.nbytes < _LARGE_BYTES and self._buckets is None:
            return
        if parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = view
        if self._buckets is not None:
            self._buckets.arrived(index)

    @property
    def views(self) -> list[torch.Tensor]:
        """Where each parameter's gradient is reduced; none with one instance."""
        return self._flat.views if self._flat is not None else []

    def _largest(self, seconds: float) -> float:
        largest = np.array([seconds])
        self._communicator.all_reduce(largest, "max", "seconds of a step")
        return float(largest[0])

    def begin(self) -> None:
        """Start a window."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._buckets is not None:
            self._buckets.begin(overlap=self._trial.begin())

    def enter(self, replica: int) -> None:
        """Do nothing: replicas share the gradients."""

    def leave(self, replica: int) -> None:
        """Move the gradients to where they are reduced."""
        if self._flat is not None:
            self._flat.take(self._parameters)

    def finish(self) -> None:
        """Sum over the instances."""
        if self._flat is None:
            return
        self._flat.complete(self._parameters)
        if self._buckets is not None:
            self._buckets.finish()
            self._trial.end()
            return
        for array in self._flat.arrays:
            if self._slices is not None:
                self._slices.reduce_slice(array, name="gradients")
            else:
                self._communicator.all_reduce(array, name="gradients")


class TreeGradients:
    """Every replica has its own gradients; they are added in a fixed order.

    The order is a binary tree over the global replica index: neighbours 0+1, 2+3, ... are added,
    then their sums, and so on. It does not depend on the number of instances, so neither do the
    bits of the result.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], communicator: Communicator, replicas: int
    ) -> None:
        self._parameters = list(parameters)
        self._communicator = communicator
        self._leaves = _memory(self._parameters, communicator, replicas)
        self._rows = [
            FlatBuffers(self._parameters, {d: leaves[row] for d, leaves in self._leaves.items()})
            for row in range(replicas)
        ]
        self._own: list[list[torch.Tensor | None]] = []

    def begin(self) -> None:
        """Start a window."""
        self._own = [[None] * len(self._parameters) for _ in self._rows]

    def enter(self, replica: int) -> None:
        """Let the next backward add to the gradients of this replica."""
        for parameter, gradient in zip(self._parameters, self._own[replica], strict=True):
            parameter.grad = gradient

    def arrived(self, index: int) -> None:
        """Do nothing: gradients of a replica are complete when it ends."""

    def leave(self, replica: int) -> None:
        """Put the replica's gradients aside."""
        self._rows[replica].take(self._parameters)
        self._own[replica] = [parameter.grad for parameter in self._parameters]

    def finish(self) -> None:
        """Add up the tree."""
        for replica, row in reversed(list(enumerate(self._rows))):
            self.enter(replica)
            row.complete(self._parameters)
        for leaves in self._leaves.values():
            self._communicator.add_replicas(leaves.numpy())
