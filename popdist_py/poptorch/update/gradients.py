"""From the gradients of the local replicas to those of all replicas of all instances.

With several instances the gradients of one dtype live in one flat buffer, in memory that the
instances of a host share, so that the reduction is one call without copies; with one instance
nothing is copied. When gradients are reduced is decided in ``training.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from popdist_py.collectives import Communicator, HostMemory
from popdist_py.poptorch.update.compression import Reduction, ReductionOf, exact
from popdist_py.poptorch.update.flat_buffers import FlatBuffers, element_counts
from popdist_py.poptorch.update.gradient_buckets import Autotuner, Buckets

__all__ = ["Gradients", "SharedGradients", "TreeGradients"]

# A gradient of at least this size is moved while backward runs and the cache still holds it; for a
# smaller one a call of its own takes longer than it saves.
_LARGE_BYTES = 1 << 20


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _tell(listener: weakref.WeakMethod[Any], index: int, _: torch.Tensor) -> None:
    on_grad_ready = listener()
    if on_grad_ready is not None:
        on_grad_ready(index)


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


def _slice_reduction(memory: HostMemory) -> ReductionOf:
    """Return what makes reductions of the slices that instances update."""
    return lambda array, _: Reduction(partial(memory.reduce_slice, array, name="gradients"))


class Gradients(Protocol):
    """What happens to gradients during one accumulation window."""

    @property
    def reuses_memory(self) -> bool:
        """Whether the next window writes where the gradients of this one lie."""

    def zero(self) -> None:
        """Start a window: no parameter has a gradient."""

    def select_replica(self, replica: int) -> None:
        """Let the next backward add to the gradients of one local replica."""

    def on_grad_ready(self, index: int) -> None:
        """Take note that a backward has added to the gradient of a parameter, while it runs."""

    def forget_order(self) -> None:
        """Take note that this window's backwards come in another number than those before."""

    def collect(self) -> None:
        """Keep what the backward of the selected replica has added."""

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients that add up apart from one another, to be read or changed in place.

        One list if all local replicas add to the same gradients, otherwise one for each replica.
        """

    def all_reduce(self) -> None:
        """Leave in every parameter's ``grad`` the sum over all replicas of all instances."""

    def in_parts(self) -> Iterator[Sequence[torch.Tensor]] | None:
        """Do as ``all_reduce``, and yield parameters as soon as they have their sums.

        None if all have them at once.
        """


class SharedGradients:
    """All local replicas add to the same gradients; instances are reduced in any order.

    Args:
        parameters: whose gradients they are.
        communicator: the other instances.
        overlap: whether reducing begins while backward runs; None: what measures faster between
            hosts, and no within one host.
        slices_only: whether each instance needs no more than the slice that it updates.
        reduction_of: makes what reduces an array of gradients; by default a plain all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        communicator: Communicator,
        overlap: bool | None = None,
        *,
        slices_only: bool = False,
        reduction_of: ReductionOf | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._communicator = communicator
        self._flat: FlatBuffers | None = None
        self._buckets: Buckets | None = None
        self._reductions: list[Reduction] = []
        memory = communicator.host_memory if slices_only else None
        if memory is not None:
            reduction_of = _slice_reduction(memory)
        reduction_of = reduction_of or exact(communicator)
        if overlap is None and not communicator.spans_hosts:
            overlap = False
        self._autotuner = Autotuner(self._largest, overlap)
        if communicator.num_instances > 1:
            rooms = _memory(self._parameters, communicator, 1)
            self._flat = FlatBuffers(self._parameters, {d: rows[0] for d, rows in rooms.items()})
            if overlap is not False:
                self._buckets = Buckets(self._flat.views, communicator, reduction_of)
            else:
                self._reductions = [
                    reduction_of(
                        buffer.numpy(), [p.shape for p in self._parameters if p.dtype == dtype]
                    )
                    for dtype, buffer in self._flat.buffers.items()
                ]
            self._listen()

    def _listen(self) -> None:
        """Hear of gradients while autograd's backward runs."""
        listener = weakref.WeakMethod(self.on_grad_ready)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, listener, index))
            for index, (parameter, view) in enumerate(
                zip(self._parameters, self.views, strict=True)
            )
            if self._buckets is not None or view.nbytes >= _LARGE_BYTES
        ]
        # Parameters outlive their optimiser: hooks that stay would keep its buffers alive.
        weakref.finalize(self, _remove, handles)

    @torch.no_grad()
    def on_grad_ready(self, index: int) -> None:
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
            self._buckets.on_grad_ready(index)

    @property
    def views(self) -> list[torch.Tensor]:
        """Where each parameter's gradient is reduced; none with one instance."""
        return self._flat.views if self._flat is not None else []

    @property
    def reuses_memory(self) -> bool:
        """Whether gradients lie in the buffer that instances reduce."""
        return self._flat is not None

    def _largest(self, seconds: float) -> float:
        largest = np.array([seconds])
        self._communicator.all_reduce(largest, "max", "seconds of a step")
        return float(largest[0])

    def zero(self) -> None:
        """Start a window."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._buckets is not None:
            self._buckets.zero(overlap=self._autotuner.begin())

    def forget_order(self) -> None:
        """Reduce nothing of this window early."""
        if self._buckets is not None:
            self._buckets.close()

    def select_replica(self, replica: int) -> None:
        """Do nothing: replicas share the gradients."""

    def collect(self) -> None:
        """Move the gradients to where they are reduced."""
        if self._flat is not None:
            self._flat.take(self._parameters)

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients that all local replicas add to."""
        yield _present(self._parameters)

    def all_reduce(self) -> None:
        """Sum over the instances."""
        for _ in self.in_parts() or ():
            pass
        if self._flat is not None and self._buckets is None:
            self._flat.complete(self._parameters)
            for reduce in self._reductions:
                reduce()

    def in_parts(self) -> Iterator[Sequence[torch.Tensor]] | None:
        """Sum over the instances, bucket by bucket; None without buckets."""
        if self._flat is None or self._buckets is None:
            return None
        return self._in_buckets(self._flat, self._buckets)

    def _in_buckets(self, flat: FlatBuffers, buckets: Buckets) -> Iterator[Sequence[torch.Tensor]]:
        flat.complete(self._parameters)
        for members in buckets.reduced():
            yield [self._parameters[index] for index in members]
        self._autotuner.end()


class TreeGradients:
    """Every replica has its own gradients; they are added in a fixed order.

    The order is a binary tree over the global replica index: neighbours 0+1, 2+3, ... are added,
    then their sums, and so on. It does not depend on the number of instances, so neither do the
    bits of the result.
    """

    reuses_memory = True

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
        self._selected = 0

    def zero(self) -> None:
        """Start a window."""
        self._own = [[None] * len(self._parameters) for _ in self._rows]

    def select_replica(self, replica: int) -> None:
        """Let the next backward add to the gradients of this replica."""
        self._selected = replica
        for parameter, gradient in zip(self._parameters, self._own[replica], strict=True):
            parameter.grad = gradient

    def forget_order(self) -> None:
        """Do nothing: nothing is reduced early."""

    def on_grad_ready(self, index: int) -> None:
        """Do nothing: gradients of a replica are complete when it ends."""

    def collect(self) -> None:
        """Put the selected replica's gradients aside."""
        self._rows[self._selected].take(self._parameters)
        self._own[self._selected] = [parameter.grad for parameter in self._parameters]

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients of each replica."""
        for replica in range(len(self._rows)):
            self.select_replica(replica)
            yield _present(self._parameters)

    def all_reduce(self) -> None:
        """Add up the tree."""
        for replica, row in reversed(list(enumerate(self._rows))):
            self.select_replica(replica)
            row.complete(self._parameters)
        for leaves in self._leaves.values():
            self._communicator.add_replicas(leaves.numpy())

    def in_parts(self) -> None:
        """Return None: the tree adds up all at once."""


def _present(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
