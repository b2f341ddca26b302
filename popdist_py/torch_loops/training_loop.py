"""The training loop of a PyTorch program, seen through hooks and wrappers of torch's functions.

The time in which a ``DataLoader`` makes the next batch counts as LOADING, and an optimizer's step
as UPDATING. The forward pass has no certain begin and end in PyTorch. If the program has loaded a
batch, the time from the batch to the end of ``backward`` counts as COMPUTING. Otherwise only
``backward`` does, because the program may load its data itself. With a timeline, the same times are
spans.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from popdist_py import activities, environment, heartbeat
from popdist_py.activities import ledger
from popdist_py.torch_loops.counted_optimizer import CountedOptimizer

# The rows and the names of the spans are those of wrapped PopTorch models.
_ROW = "device"


class _Thread:
    """The state of one thread, because threads may run training loops at the same time.

    Attributes:
        has_loaded: Whether a batch was loaded since the last counted step.
        in_backward: Whether a backward pass is running.
        own_since: The own time (see ``activities.own_time``) when the last batch, backward pass or
            update ended; -1 if unknown.
        since: With a timeline, the time of the same event.
        updates: The optimizers whose steps have begun, the innermost step last. Each item contains
            the id of the optimizer, and the own time and the time when the step began.
    """

    __slots__ = ("has_loaded", "in_backward", "own_since", "since", "updates")

    def __init__(self) -> None:
        self.has_loaded = self.in_backward = False
        self.own_since, self.since = -1, 0
        self.updates: list[tuple[int, int, int]] = []


class _OfThread(threading.local):
    """The holder of the calling thread's state, whose attributes are faster than a local's."""

    def __init__(self) -> None:
        self.thread = _Thread()


class TrainingLoop:
    """The loop of this process, whose methods the hooks and wrappers of torch call.

    Args:
        timeline: The module ``popdist_py.timeline.spans``; None if no timeline is recorded.
    """

    def __init__(self, timeline: Any = None) -> None:
        self._timeline = timeline
        self._counted = CountedOptimizer()
        self._here = _OfThread()

    def begin_update(self, optimizer: Any) -> None:
        """Handle the begin of an optimizer's step."""
        if heartbeat.has_model():
            return
        self._counted.begin_step(optimizer)
        own, thread = activities.own_time(), self._here.thread
        # The step may contain forward and backward passes, such as those of LBFGS.
        thread.own_since = own
        if self._timeline is not None:
            thread.since = time.monotonic_ns()
        thread.updates.append((id(optimizer), own, thread.since))

    def end_update(self, optimizer: Any) -> None:
        """Handle the end of an optimizer's step, and count the step if it is a training step."""
        thread = self._here.thread
        updates, begun = thread.updates, 0
        while updates and begun != id(optimizer):  # the steps above this step have failed
            begun, own, began = updates.pop()
        if begun == id(optimizer):
            activities.count_own_as(activities.UPDATING, own)
            if self._timeline is not None and own >= 0:
                self._timeline.add(_ROW, "update", began, time.monotonic_ns())
            self._mark(thread, own)
        if self._counted.end_step(optimizer):
            heartbeat.count_automatically()
            thread.has_loaded = False

    def load(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, which returns the next batch of a loader."""
        own = activities.own_time()
        # A loader of this library, or the program itself, may count the time already.
        if own < 0 or heartbeat.has_model():
            return function(*arguments)
        with activities.doing(activities.LOADING):
            batch = function(*arguments)
        thread = self._here.thread
        thread.has_loaded = True
        thread.updates.clear()  # an optimizer loads no batches, so these steps have failed
        self._mark(thread, own)
        return batch

    def backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call ``function``, which runs a backward pass."""
        own, thread = activities.own_time(), self._here.thread
        if own < 0 or thread.in_backward or heartbeat.has_model():
            return function(*arguments, **named)
        if thread.has_loaded and thread.own_since >= 0:
            own = thread.own_since
            if self._timeline is not None:
                self._timeline.add(_ROW, "forward", thread.since, time.monotonic_ns())
        thread.in_backward = True
        try:
            if self._timeline is None:
                return function(*arguments, **named)
            return self._recorded_backward(function, *arguments, **named)
        finally:
            thread.in_backward = False
            activities.count_own_as(activities.COMPUTING, own)
            self._mark(thread, own)

    def _recorded_backward(
        self, function: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Any:
        shown: dict[str, float] = {}
        with self._timeline.row_span(_ROW, "backward", shown):
            before = ledger.waited()
            result = function(*arguments, **named)
            # DistributedDataParallel waits in C++, so the wait has no span.
            if (waited := ledger.waited() - before) > 0:
                shown["waited_ms"] = round(waited / 1e6, 3)
        return result

    def _mark(self, thread: _Thread, own: int) -> None:
        """Let a forward pass begin now. ``own`` is the own time now, which no activity includes."""
        thread.own_since = own
        if self._timeline is not None:
            thread.since = time.monotonic_ns()


def make_loop() -> TrainingLoop | None:
    """Return the loop of this program, whose loaders and backward passes are observed from now on.

    The caller calls ``begin_update`` and ``end_update``. The result is None for a program with a
    PopTorch model, whose training calls report everything.
    """
    if heartbeat.has_model():
        return None
    timeline = None
    if os.environ.get(environment.TIMELINE) or "popdist_py.timeline.spans" in sys.modules:
        from popdist_py.timeline import spans

        timeline = spans if spans.is_recording() else None
    loop = TrainingLoop(timeline)
    # The waits must be counted inside of the observed backward pass, so they are wrapped first.
    heartbeat.watch_torch_waits()
    torch = sys.modules["torch"]
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if is_compiling is not None:
        _wrap(torch.autograd, "backward", loop.backward, is_compiling)
    loaders = sys.modules.get("torch.utils.data.dataloader")
    iterator = getattr(loaders, "_BaseDataLoaderIter", None)
    if iterator is not None:
        _wrap(iterator, "__next__", loop.load, lambda: False)
    return loop


def _wrap(
    place: Any, name: str, call: Callable[..., Any], is_compiling: Callable[[], bool]
) -> None:
    """Let ``call`` make the calls of a function of torch, except where torch.compile traces it."""
    function = getattr(place, name)

    @functools.wraps(function)
    def observed(*arguments: Any, **named: Any) -> Any:
        if is_compiling():
            return function(*arguments, **named)
        return call(function, *arguments, **named)

    setattr(place, name, observed)
