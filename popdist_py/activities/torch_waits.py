"""Counting of the time that a program waits in torch.distributed and DistributedDataParallel.

Python waits for a collective in ``Work.wait()``. DistributedDataParallel waits in C++: during
backward, and during forward when it broadcasts the buffers of a model. All time in ``Work.wait()``
is counted as waiting for other instances. In backward and in the broadcast of buffers, only the
time for which the thread sleeps is counted. A thread sleeps while it neither computes nor waits for
a CPU.

This module does not import torch, because every program that uses torch.distributed has already
imported it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from popdist_py.activities import ledger


def watch() -> None:
    """Count the time that this thread waits in torch.distributed, if the program uses it."""
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
        _replace(distributed, "_broadcast_coalesced", sleeping)  # broadcasts a model's buffers
        _replace(torch.autograd, "backward", sleeping)


def _replace(place: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace a function of torch with a wrapper, if this version of torch has the function."""
    if function := getattr(place, name, None):
        setattr(place, name, wrap(function))


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that counts all its time as waiting."""

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
    """Return a wrapper of ``function`` that counts the time when the thread sleeps as waiting."""

    def awake() -> int:
        return time.thread_time_ns() + queued_nanoseconds()

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if is_compiling():  # torch.compile traces this function but does not support clocks
            return function(*arguments, **named)
        began, awake_before, waited_before = time.monotonic_ns(), awake(), ledger.waited()
        result = function(*arguments, **named)
        slept = time.monotonic_ns() - began - (awake() - awake_before)
        ledger.count_as_waiting(slept - (ledger.waited() - waited_before))
        return result

    return call


def _queue_of_this_thread() -> Callable[[], int] | None:
    """Return a function that returns the nanoseconds that this thread has waited for a CPU.

    Returns:
        None if the kernel does not provide this time.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        int(os.pread(file, 100, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return lambda: int(os.pread(file, 100, 0).split()[1])
