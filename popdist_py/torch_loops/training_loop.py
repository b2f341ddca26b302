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
import time
from collections.abc import Callable
from typing import Any

from popdist_py import activities, environment, heartbeat
from popdist_py.activities import ledger
from popdist_py.torch_loops.counted_optimizer import CountedOptimizer

# The rows and the names of the spans are those of wrapped PopTorch models.
_ROW = "device"


class TrainingLoop:
    """The loop of this process, whose methods the hooks and wrappers of torch call.

    Args:
        timeline: The module ``popdist_py.timeline.spans``; None if no timeline is recorded.
    """

    def __init__(self, timeline: Any = None) -> None:
        self._timeline = timeline
        self._counted = CountedOptimizer()
        self._has_loaded = False  # whether a batch was loaded since the last counted step
        self._in_backward = False
        # The own time (see ``activities.own_time``) and, with a timeline, the time when the last
        # batch, backward pass or update ended.
        self._own_since, self._since = -1, 0
        # The optimizers whose steps have begun, the innermost step last. Each item contains the id
        # of the optimizer, and the own time and the time when the step began.
        self._updates: list[tuple[int, int, int]] = []

    def begin_update(self, optimizer: Any) -> None:
        """Handle the begin of an optimizer's step."""
        self._counted.begin_step(optimizer)
        own = activities.own_time()
        # The step may contain forward and backward passes, such as those of LBFGS.
        self._mark(own)
        self._updates.append((id(optimizer), own, self._since))

    def end_update(self, optimizer: Any) -> None:
        """Handle the end of an optimizer's step, and count the step if it is a training step."""
        updates, begun = self._updates, 0
        while updates and begun != id(optimizer):  # the steps above this step have failed
            begun, own, began = updates.pop()
        if begun == id(optimizer):
            activities.count_own_as(activities.UPDATING, own)
            if self._timeline is not None and own >= 0:
                self._timeline.add(_ROW, "update", began, time.monotonic_ns())
            self._mark(own)
        if self._counted.end_step(optimizer):
            heartbeat.count_automatically()
            self._has_loaded = False

    def load(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, which returns the next batch of a loader."""
        own = activities.own_time()
        # A loader of this library, or the program itself, may count the time already.
        if own < 0 or heartbeat.has_model():
            return function(*arguments)
        with activities.doing(activities.LOADING):
            batch = function(*arguments)
        self._has_loaded = True
        self._updates.clear()  # an optimizer loads no batches, so these steps have failed
        self._mark(own)
        return batch

    def backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call ``function``, which runs a backward pass."""
        own = activities.own_time()
        if own < 0 or self._in_backward or heartbeat.has_model():
            return function(*arguments, **named)
        if self._has_loaded and self._own_since >= 0:
            own = self._own_since
            if self._timeline is not None:
                self._timeline.add(_ROW, "forward", self._since, time.monotonic_ns())
        self._in_backward = True
        try:
            if self._timeline is None:
                return function(*arguments, **named)
            return self._recorded_backward(function, *arguments, **named)
        finally:
            self._in_backward = False
            activities.count_own_as(activities.COMPUTING, own)
            self._mark(own)

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

    def _mark(self, own: int) -> None:
        """Let a forward pass begin now. ``own`` is the own time now, which no activity includes."""
        self._own_since = own
        if self._timeline is not None:
            self._since = time.monotonic_ns()


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
