"""The reduction (sum) of gradients over the replicas of this instance and over all instances.

If the job has several instances, the gradients of one dtype are stored in one flat buffer. The
instances of a host share the memory of the flat buffer, so one call without copies sums the
gradients. If the job has only one instance (process), gradients are not copied to flat buffers. The
module ``training.py`` calls ``all_reduce`` or ``in_parts`` at the end of each accumulation window
(the micro-batches between two weight updates).
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
from popdist_py.poptorch.update.compressed.compression import Reduction, ReductionOf, exact
from popdist_py.poptorch.update.flat_buffers import FlatBuffers, element_counts
from popdist_py.poptorch.update.gradient_buckets import Autotuner, Buckets
from popdist_py.poptorch.weights.parameter_gradients import (
    clear_gradients,
    gradients_of,
    set_gradients,
)

__all__ = ["Gradients", "SharedGradients", "TreeGradients"]

# A gradient of at least _LARGE_BYTES is copied to its flat buffer during the backward pass, while
# the CPU cache still holds the gradient. For a gradient with fewer bytes, a separate call that
# copies the gradient takes more time than the CPU cache saves.
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
    """Return memory for ``rows`` copies of the tensors: one array [rows, elements] for each dtype.

    The instances of a host share the returned memory, so the communicator reduces arrays in this
    memory faster than other arrays.
    """
    return {
        dtype: torch.from_numpy(communicator.gradient_buffer(rows * size * dtype.itemsize))
        .view(dtype)
        .view(rows, size)
        for dtype, size in element_counts(tensors).items()
    }


def _slice_reduction(memory: HostMemory) -> ReductionOf:
    """Return a function that makes a ``Reduction`` of only this instance's slice of an array."""
    return lambda array, _: Reduction(partial(memory.reduce_slice, array, name="gradients"))


class Gradients(Protocol):
    """The interface of classes that accumulate gradients and sum them over all replicas."""

    @property
    def reuses_memory(self) -> bool:
        """Whether the next accumulation window overwrites the gradients' memory.

        An accumulation window consists of the micro-batches between two weight updates.
        """

    def zero(self) -> None:
        """Start an accumulation window, and delete the gradients of the previous window."""

    def select_replica(self, replica: int) -> None:
        """Make the next backward pass accumulate the gradients of the local replica ``replica``."""

    def on_grad_ready(self, index: int) -> None:
        """Process a gradient that a running backward pass has just added to a parameter's ``grad``.

        Args:
            index: The index of the gradient's parameter.
        """

    def collect(self) -> None:
        """Store the gradients that the selected replica's backward pass has accumulated."""

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield lists of this instance's gradients, which the caller may change in place.

        If all local replicas share the gradients, the iterator has one list. If each replica has
        separate gradients, the iterator has one list for each replica.
        """

    def all_reduce(self) -> None:
        """Store the sum of gradients over all replicas in ``grad`` of every parameter."""

    def in_parts(self) -> Iterator[Sequence[torch.Tensor]] | None:
        """Sum gradients like ``all_reduce``, and yield parameters whose gradients are summed.

        Returns:
            An iterator over lists of parameters whose gradients are summed; None if all gradients
            are summed at the same time.
        """


class SharedGradients:
    """Gradients that are shared by all local replicas of an instance.

    The sum of gradients over all instances may be computed in any order.

    Args:
        parameters: The parameters that have the gradients.
        communicator: The communicator for calls between the instances.
        overlap: Whether gradients are summed over the instances during the backward pass. If
            ``overlap`` is None and there are several hosts, training steps are timed with the
            reduction of gradients during and after the backward pass, and the faster way is used.
            If ``overlap`` is None and there is one host, gradients are reduced after the backward
            pass.
        slices_only: Whether each instance needs the summed gradients only of the slice of weights
            that it updates.
        reduction_of: A function that returns the ``Reduction`` (the sum over all instances) of an
            array of gradients; by default an all-reduce without compression.
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
        """Register gradient hooks that call ``on_grad_ready`` during autograd's backward pass."""
        listener = weakref.WeakMethod(self.on_grad_ready)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, listener, index))
            for index, (parameter, view) in enumerate(
                zip(self._parameters, self.views, strict=True)
            )
            if self._buckets is not None or view.nbytes >= _LARGE_BYTES
        ]
        # The hooks of the parameters are removed when the SharedGradients object is deleted,
        # because the parameters exist longer than the object.
        weakref.finalize(self, _remove, handles)

    @torch.no_grad()
    def on_grad_ready(self, index: int) -> None:
        """Move a gradient to its flat buffer, and start to reduce complete buckets.

        A large gradient is moved immediately, because the CPU cache still holds the gradient. If
        the gradients are not divided into buckets, the method ``collect`` moves small gradients
        later.
        """
        if self._flat is None:
            return
        parameter, view = self._parameters[index], self._flat.views[index]
        if view.nbytes < _LARGE_BYTES and self._buckets is None:
            return
        if parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            set_gradients([parameter], [view])
        if self._buckets is not None:
            self._buckets.on_grad_ready(index)

    @property
    def views(self) -> list[torch.Tensor]:
        """The view of a flat buffer for each parameter's gradient.

        The list of views is empty if there is only one instance.
        """
        return self._flat.views if self._flat is not None else []

    @property
    def reuses_memory(self) -> bool:
        """Whether gradients are stored in flat buffers, which every accumulation window reuses."""
        return self._flat is not None

    def _largest(self, seconds: float) -> float:
        largest = np.array([seconds])
        self._communicator.all_reduce(largest, "max", "seconds of a step")
        return float(largest[0])

    def zero(self) -> None:
        """Start an accumulation window, and delete the gradients of the previous window."""
        clear_gradients(self._parameters)
        if self._buckets is not None:
            self._buckets.zero(overlap=self._autotuner.begin())

    def select_replica(self, replica: int) -> None:
        """Do nothing, because all local replicas add to the same gradients."""

    def collect(self) -> None:
        """Move the gradients to the flat buffers, if there are several instances."""
        if self._flat is not None:
            self._flat.take(self._parameters)

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield one list with the gradients that the local replicas share."""
        yield _present(self._parameters)

    def all_reduce(self) -> None:
        """Sum the gradients over the instances."""
        for _ in self.in_parts() or ():
            pass
        if self._flat is not None and self._buckets is None:
            self._flat.complete(self._parameters)
            for reduce in self._reductions:
                reduce()

    def in_parts(self) -> Iterator[Sequence[torch.Tensor]] | None:
        """Sum the gradients over the instances, one bucket after the other.

        Returns:
            An iterator over the parameters of each summed bucket; None if the gradients are not
            divided into buckets.
        """
        if self._flat is None or self._buckets is None:
            return None
        return self._in_buckets(self._flat, self._buckets)

    def _in_buckets(self, flat: FlatBuffers, buckets: Buckets) -> Iterator[Sequence[torch.Tensor]]:
        flat.complete(self._parameters)
        for members in buckets.reduced():
            yield [self._parameters[index] for index in members]
        self._autotuner.end()


class TreeGradients:
    """Separate gradients for each replica, which are summed in a fixed order.

    The order of additions is a binary tree over the global replica index. First the gradients of
    neighbouring replicas are added (replicas 0 and 1, replicas 2 and 3, ...), then neighbouring
    sums are added, and so on. The binary tree of additions does not depend on the number of
    instances. Therefore jobs with different numbers of instances compute bit-identical gradients.

    Args:
        parameters: The parameters that have the gradients.
        communicator: The communicator for calls between the instances.
        replicas: The number of local replicas.
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
        """Start an accumulation window, and delete the gradients of the previous window."""
        self._own = [[None] * len(self._parameters) for _ in self._rows]

    def select_replica(self, replica: int) -> None:
        """Make the next backward pass add to the gradients of the given replica."""
        self._selected = replica
        set_gradients(self._parameters, self._own[replica])

    def on_grad_ready(self, index: int) -> None:
        """Do nothing, because ``collect`` moves all gradients after the backward pass."""

    def collect(self) -> None:
        """Move the selected replica's gradients to the replica's row of the flat buffers."""
        self._rows[self._selected].take(self._parameters)
        self._own[self._selected] = gradients_of(self._parameters)

    def local_sums(self) -> Iterator[list[torch.Tensor]]:
        """Yield one list for each replica, with the gradients of the replica."""
        for replica in range(len(self._rows)):
            self.select_replica(replica)
            yield _present(self._parameters)

    def all_reduce(self) -> None:
        """Store the sum of gradients over all replicas in every parameter's ``grad``."""
        for replica, row in reversed(list(enumerate(self._rows))):
            self.select_replica(replica)
            row.complete(self._parameters)
        for leaves in self._leaves.values():
            self._communicator.add_replicas(leaves.numpy())

    def in_parts(self) -> None:
        """Return None, because one call of ``all_reduce`` sums all gradients at the same time."""


def _present(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of all parameters that have a gradient."""
    return [gradient for gradient in gradients_of(parameters) if gradient is not None]
