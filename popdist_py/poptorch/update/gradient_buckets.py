"""Reducing gradients while backward still runs: in buckets, each as soon as it is complete.

Between hosts the network then works beside the cores; within one host both need the same memory, so
it rarely pays. Whether it does is measured in the first steps.
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
from popdist_py.poptorch.update.compression import ReductionOf

__all__ = ["Autotuner", "Buckets"]

_BUCKET_BYTES = 8 * 1024 * 1024
# The autotuner decides after _STEPS steps of each choice, or after _FEW_STEPS if they took long.
_FEW_STEPS, _STEPS, _LONG_SECONDS = 2, 4, 1.0


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Neighbouring gradients that are reduced together.

    Attributes:
        members: index of their parameters.
        array: the part of the flat buffer that holds them.
    """

    members: tuple[int, ...]
    array: Array


class Buckets:
    """The gradients of one model in the order in which backward completes them.

    Buckets are reduced in one fixed order, the same on all instances. How often a backward adds to
    a parameter in one accumulation window is learned from the window before.

    Args:
        views: the gradients in the flat buffers.
        communicator: the other instances.
        reduction_of: makes what reduces a bucket.
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
            # The members lie in the array from the last to the first.
            reduction_of(bucket.array, [views[index].shape for index in reversed(bucket.members)])
            for bucket in self._buckets
        ]
        self._arrivals = [0] * len(views)
        self._expected = [0] * len(views)
        self._num_started = 0
        self._finish: Callable[[], None] | None = None  # what the last one that started needs yet
        self._handles: list[Handle[None]] = []  # of those that are finished
        self._is_open = False
        self._has_learned = False

    def zero(self, *, overlap: bool) -> None:
        """Start an accumulation window, in which buckets may be reduced before ``reduced``.

        None are after a window without it, as comparing replica back ends makes.
        """
        self._expected, self._arrivals = self._arrivals, [0] * len(self._views)
        self._finish_started()
        self._num_started, self._handles = 0, []
        self._is_open = overlap and self._has_learned
        self._has_learned = False

    def close(self) -> None:
        """Reduce none of this window's buckets before ``reduced``."""
        self._is_open = False

    def on_grad_ready(self, index: int) -> None:
        """Take note of an addition to one gradient, and reduce the buckets that are complete."""
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
        """Start to reduce a bucket, then finish the one before: so a link has no pause between."""
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
        """Reduce what was not, once all gradients are in their views.

        Yields:
            The indices of the parameters of each bucket, as soon as it is reduced.
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
    """Finish what was started, if it could be."""
    started.wait()
    finish()


def _in_buckets(views: Sequence[torch.Tensor]) -> list[_Bucket]:
    """Group neighbours of one dtype, from the last parameter to the first."""
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
    """Return the array from the first element of the last view to the last of the first."""
    first, last = views[-1], views[0]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    flat: Array = first.as_strided((size,), (1,), first.storage_offset()).numpy()
    return np.asarray(flat)


class Autotuner:
    """Makes a choice by timing the first steps without and with it; all instances choose alike.

    Args:
        agree: returns the largest of a number over all instances.
        fixed: the choice, if there is nothing to measure.
    """

    def __init__(self, agree: Callable[[float], float], fixed: bool | None = None) -> None:
        self._agree = agree
        self._choice = fixed
        self._times: list[float] = []
        self._start = 0.0

    def begin(self) -> bool:
        """Start a step; return whether it runs with what is chosen about."""
        if self._choice is not None:
            return self._choice
        self._start = time.perf_counter()
        # Even steps run without, odd ones with it: what else changes meanwhile meets both.
        return len(self._times) % 2 == 1

    def end(self) -> None:
        """End a step."""
        if self._choice is not None:
            return
        self._times.append(time.perf_counter() - self._start)
        measured = self._times[2:]  # the first step of each kind warms up
        if len(measured) == 2 * _STEPS or (
            len(measured) == 2 * _FEW_STEPS and self._agree(sum(measured)) > _LONG_SECONDS
        ):
            # What disturbs a step only makes it longer.
            without, with_it = (min(measured[kind::2]) for kind in (0, 1))
            self._choice = self._agree(with_it) < self._agree(without)
