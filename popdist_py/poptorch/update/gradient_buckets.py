"""The reduction (sum over all instances) of gradients in buckets, during the backward pass.

A bucket is a list of gradients that are summed over the instances together, as soon as all
gradients in the bucket are complete. Because buckets are reduced during the backward pass, the
network can transfer gradients between hosts while the CPU cores compute. Within one host, the
reduction of gradients and the backward pass compete for memory bandwidth, so a reduction during the
backward pass is rarely faster. The class Autotuner measures in the first training steps whether the
reduction of gradients during the backward pass is faster than after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.background import Handle
from popdist_py.poptorch.update.compressed.compression import ReductionOf
from popdist_py.torch_states.memory_copies import wait_for_copies

__all__ = ["Autotuner", "Buckets"]

_BUCKET_BYTES = 8 * 1024 * 1024
# The autotuner measures training steps with and without an option. The autotuner decides after
# _STEPS training steps with and _STEPS without the option. If _FEW_STEPS steps of each kind take
# longer than _LONG_SECONDS in total, the autotuner decides after these steps.
_FEW_STEPS, _STEPS, _LONG_SECONDS = 2, 4, 1.0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket: neighbouring gradients that are summed over the instances together.

    Attributes:
        members: The indices of the bucket's parameters, from the last parameter to the first.
        array: The part of a flat buffer that contains the gradients of the bucket.
    """

    members: tuple[int, ...]
    array: Array


class Buckets:
    """The gradients of one model, divided into buckets.

    The first bucket contains the last parameters, because a backward pass usually completes the
    gradients of the last parameters first. All instances sum the buckets of gradients in the same
    order. A gradient counts as complete when backward passes have added to the gradient as often as
    in the previous accumulation window (the micro-batches between two weight updates).

    Args:
        views: The gradients of the model, as views of flat buffers.
        communicator: The communicator that connects the instances.
        reduction_of: A function that returns the ``Reduction`` (the sum over all instances) of a
            bucket's array.
    """

    def __init__(
        self,
        views: Sequence[torch.Tensor],
        communicator: Communicator,
        reduction_of: ReductionOf,
    ) -> None:
        self._views = views
        self._communicator = communicator
        self._buckets = _in_buckets(views)
        self._reductions = [
            # The order of the parameters' shapes is reversed, because ``members`` begins with the
            # last parameter but the array of gradients begins with the first parameter.
            reduction_of(bucket.array, [views[index].shape for index in reversed(bucket.members)])
            for bucket in self._buckets
        ]
        self._arrivals = [0] * len(views)
        self._expected = [0] * len(views)
        self._num_started = 0
        # The function that completes the reduction of the bucket that was started last.
        self._finish: Callable[[], None] | None = None
        # A handle for each bucket whose reduction the background thread is completing.
        self._handles: list[Handle[None]] = []
        self._is_open = False
        self._has_learned = False

    def zero(self, *, overlap: bool) -> None:
        """Start an accumulation window (the micro-batches between two weight updates).

        Args:
            overlap: Whether buckets of gradients may be reduced before the call of ``reduced``.
                ``overlap`` is ignored if ``reduced`` was not called in the previous accumulation
                window, for example when replica back ends are compared.
        """
        self._expected, self._arrivals = self._arrivals, [0] * len(self._views)
        self._finish_started()
        self._num_started, self._handles = 0, []
        self._is_open = overlap and self._has_learned
        self._has_learned = False

    def on_grad_ready(self, index: int) -> None:
        """Count an addition to one gradient, and start to reduce the buckets that are complete."""
        self._arrivals[index] += 1
        if not self._is_open:
            return
        if self._arrivals[index] > self._expected[index] > 0:
            raise RuntimeError(
                "A parameter got more gradients than in the previous training step, after the "
                "reduction of its gradients had started. For a model whose control flow changes, "
                "set POPDIST_GRADIENT_OVERLAP=0"
            )
        while self._num_started < len(self._buckets) and self._is_complete(self._num_started):
            self._start_next()

    def _is_complete(self, number: int) -> bool:
        return all(
            self._arrivals[index] == self._expected[index] > 0
            for index in self._buckets[number].members
        )

    def _start_next(self) -> None:
        """Start to reduce the next bucket of gradients, and then complete the previous bucket.

        Because the reduction of the next bucket starts first, the network connection between hosts
        is not idle between two buckets.
        """
        wait_for_copies()
        reduction = self._reductions[self._num_started]
        self._num_started += 1
        started = self._communicator.background.submit(reduction.start)
        self._finish_started()
        if reduction.finish is None:
            self._handles.append(started)
        else:
            self._finish = partial(_finish, started, reduction.finish)

    def _finish_started(self) -> None:
        if self._finish is not None:
            self._handles.append(self._communicator.background.submit(self._finish))
            self._finish = None

    def reduced(self) -> Iterator[Sequence[int]]:
        """Reduce the remaining buckets; before the call, all gradients must be in flat buffers.

        Yields: For each bucket, the indices of its parameters, as soon as the bucket has been
        reduced.
        """
        self._is_open = False
        self._has_learned = True
        while self._num_started < len(self._buckets):
            self._start_next()
        self._finish_started()
        for bucket, handle in zip(self._buckets, self._handles, strict=True):
            handle.wait()
            yield bucket.members


def _finish(started: Handle[None], finish: Callable[[], None]) -> None:
    """Complete the reduction of a bucket, or raise the error with which its start failed."""
    started.wait()
    finish()


def _in_buckets(views: Sequence[torch.Tensor]) -> list[_Bucket]:
    """Group neighbouring gradients of one dtype, from the last parameter to the first."""
    groups: list[list[int]] = []
    num_bytes = 0
    for index in reversed(range(len(views))):
        is_neighbour = bool(groups) and views[groups[-1][-1]].dtype == views[index].dtype
        if not is_neighbour or num_bytes >= _BUCKET_BYTES:
            groups.append([])
            num_bytes = 0
        groups[-1].append(index)
        num_bytes += views[index].nbytes
    return [_Bucket(tuple(members), _span([views[i] for i in members])) for members in groups]


def _span(views: Sequence[torch.Tensor]) -> Array:
    """Return the part of the flat buffer that contains all ``views``.

    The views of the gradients are in the reverse order of the flat buffer, so the last view comes
    first in the flat buffer.
    """
    first, last = views[-1], views[0]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    flat: Array = first.as_strided((size,), (1,), first.storage_offset()).numpy()
    return np.asarray(flat)


class Autotuner:
    """A choice to use an option, made by timing training steps with and without the option.

    All instances make the same choice.

    Args:
        agree: A function that gets a number from each instance, and returns the maximum of these
            numbers on every instance.
        fixed: Whether all training steps use the option; None to measure training steps with and
            without the option.
    """

    def __init__(self, agree: Callable[[float], float], fixed: bool | None = None) -> None:
        self._agree = agree
        self._choice = fixed
        self._times: list[float] = []
        self._start = 0.0

    def begin(self) -> bool:
        """Start timing a training step, and return whether the step uses the option."""
        if self._choice is not None:
            return self._choice
        self._start = time.perf_counter()
        # Training steps without the option and with the option alternate, so that changes of the
        # machine's load affect both kinds of steps equally.
        return len(self._times) % 2 == 1

    def end(self) -> None:
        """Stop timing a training step, and make the choice if enough steps were timed."""
        if self._choice is not None:
            return
        self._times.append(time.perf_counter() - self._start)
        # The first training step with the option and the first training step without the option are
        # warm-ups.
        measured = self._times[2:]
        if len(measured) == 2 * _STEPS or (
            len(measured) == 2 * _FEW_STEPS and self._agree(sum(measured)) > _LONG_SECONDS
        ):
            # The shortest time with the option is compared with the shortest time without the
            # option, because disturbances can only make a training step longer.
            without, with_it = (min(measured[kind::2]) for kind in (0, 1))
            self._choice = self._agree(with_it) < self._agree(without)
