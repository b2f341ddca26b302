"""What a program waits for in torch.distributed and DistributedDataParallel, for the ledger.

Python waits for a collective in ``Work.wait()``. DistributedDataParallel waits in C++, within
backward, and in forward for the buffers of a model. There a thread that sleeps waits for others:
what it neither computes nor is kept from computing.

Nothing here imports torch: a program that uses torch.distributed has done so.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from popdist_py.activities import ledger

__all__ = ["watch"]


def watch() -> None:
    """Count from now on what this thread waits for in torch.distributed, if it is in use."""
    torch = sys.modules.get("torch")
    distributed = sys.modules.get("torch.distributed")
    if torch is None or distributed is None or not distributed.is_available():
        return
    if not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    _replace(distributed.Work, "wait", _waiting)
    queued_nanoseconds = _queue_of_this_thread()
    if queued_nanoseconds is not None:
        sleeping = functools.partial(_sleeping, torch.compiler.is_compiling, queued_nanoseconds)
        _replace(distributed, "_broadcast_coalesced", sleeping)  # the buffers
        _replace(torch.autograd, "backward", sleeping)


def _replace(place: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Wrap a function of torch; another version may have none of this name."""
    if function := getattr(place, name, None):
        setattr(place, name, wrap(function))


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose time is all waiting."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with ledger.doing(ledger.WAITING, "torch.distributed"):
            return function(*arguments, **named)

    return call


def _sleeping(
    is_compiling: Callable[[], bool],
    queued_nanoseconds: Callable[[], int],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """Return the function, of which the time that the thread sleeps is waiting."""

    def awake() -> int:
        return time.thread_time_ns() + queued_nanoseconds()

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if is_compiling():  # torch.compile reads this as well, and knows no clocks
            return function(*arguments, **named)
        began, awake_before, waited_before = time.monotonic_ns(), awake(), ledger.waited()
        result = function(*arguments, **named)
        slept = time.monotonic_ns() - began - (awake() - awake_before)
        ledger.count_as_waiting(slept - (ledger.waited() - waited_before))
        return result

    return call


def _queue_of_this_thread() -> Callable[[], int] | None:
    """Return what tells for how long this thread has waited for a CPU; None if nothing does."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        int(os.pread(file, 100, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return lambda: int(os.pread(file, 100, 0).split()[1])
