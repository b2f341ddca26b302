"""The reduction of gradients in buckets, during the backward pass.

A bucket is a group of gradients that are reduced together, as soon as all gradients in the bucket
are complete. Because buckets are reduced during the backward pass, the network can transfer
gradients between hosts while the CPU cores compute. Within one host, the reduction and the backward
pass compete for memory bandwidth, so a reduction during the backward pass is rarely faster. The
class Autotuner measures in the first training steps whether a reduction during the backward pass is
faster.
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

__all__ = ["Autotuner", "Buckets"]

_BUCKET_BYTES = 8 * 1024 * 1024
# The autotuner measures training steps with and without an option. The autotuner decides after
# _STEPS steps of each kind, or after _FEW_STEPS steps of each kind if these took longer than
# _LONG_SECONDS in total.
_FEW_STEPS, _STEPS, _LONG_SECONDS = 2, 4, 1.0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Neighbouring gradients that are reduced together.

    Attributes:
        members: The indices of the bucket's parameters, from the last parameter to the first.
        array: The part of a flat buffer that contains the gradients of the bucket.
    """

    members: tuple[int, ...]
    array: Array


class Buckets:
    """The gradients of one model, divided into buckets.

    The first bucket contains the last parameters, because a backward pass usually completes the
    gradients of the last parameters first. All instances reduce the buckets in the same order. A
    gradient counts as complete when backward passes have added to the gradient as often as in the
    previous accumulation window (the micro-batches between two weight updates).

    Args:
        views: The gradients of the model, as views of flat buffers.
        communicator: The communicator that connects the instances.
        reduction_of: A function that returns the ``Reduction`` of a bucket's array.
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
            # The order of the shapes is reversed, because ``members`` begins with the last
            # parameter but the array begins with the first.
            reduction_of(bucket.array, [views[index].shape for index in reversed(bucket.members)])
            for bucket in self._buckets
        ]
        self._arrivals = [0] * len(views)
        self._expected = [0] * len(views)
        self._num_started = 0
        # The function that completes the last started reduction of a bucket.
        self._finish: Callable[[], None] | None = None
        # A handle for each bucket whose reduction the background thread is completing.
        self._handles: list[Handle[None]] = []
        self._is_open = False
        self._has_learned = False

    def zero(self, *, overlap: bool) -> None:
        """Start an accumulation window (the micro-batches between two weight updates).

        Args:
            overlap: Whether buckets may be reduced before the call of ``reduced``. ``overlap`` is
                ignored if ``reduced`` was not called in the previous accumulation window, for
                example when replica back ends are compared.
        """
        self._expected, self._arrivals = self._arrivals, [0] * len(self._views)
        self._finish_started()
        self._num_started, self._handles = 0, []
        self._is_open = overlap and self._has_learned
        self._has_learned = False

    def on_grad_ready(self, index: int) -> None:
        """Count an addition to one gradient, and start to reduce buckets that are complete."""
        self._arrivals[index] += 1
        if not self._is_open:
            return
        if self._arrivals[index] > self._expected[index] > 0:
            raise RuntimeError(
                "a parameter got more gradients than in the step before, after its sum was on the "
                "way: set POPDIST_GRADIENT_OVERLAP=0 for models whose control flow changes"
            )
        while self._num_started < len(self._buckets) and self._is_complete(self._num_started):
            self._start_next()

    def _is_complete(self, number: int) -> bool:
        return all(
            self._arrivals[index] == self._expected[index] > 0
            for index in self._buckets[number].members
        )

    def _start_next(self) -> None:
        """Start the next bucket's reduction, and then complete the previous bucket's reduction.

        Because the next reduction starts first, the network connection between hosts is not idle
        between two buckets.
        """
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
    """Complete a reduction. If the start of the reduction failed, raise the error instead."""
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

    The views have the reverse order of the buffer, so the last view comes first in the buffer.
    """
    first, last = views[-1], views[0]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    flat: Array = first.as_strided((size,), (1,), first.storage_offset()).numpy()
    return np.asarray(flat)


class Autotuner:
    """A choice to use an option or not, made by timing the first steps with and without the option.

    All instances choose the same value of the option.

    Args:
        agree: A function that returns the maximum of a number over all instances.
        fixed: Whether to use the option; None to measure the training steps with and without the
            option.
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
        # The first step of each kind (with and without the option) is a warm-up.
        measured = self._times[2:]
        if len(measured) == 2 * _STEPS or (
            len(measured) == 2 * _FEW_STEPS and self._agree(sum(measured)) > _LONG_SECONDS
        ):
            # The shortest times of each kind are compared, because disturbances can only make a
            # step longer.
            without, with_it = (min(measured[kind::2]) for kind in (0, 1))
            self._choice = self._agree(with_it) < self._agree(without)
