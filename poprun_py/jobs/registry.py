"""The jobs that this process has started and that still run: stopped when it ends.

A process that was forked off has none of them: it must keep neither their channels nor their files.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poprun_py.jobs.handle import JobHandle

__all__ = ["add", "discard", "remove_with"]

_running: set[JobHandle[Any]] = set()
_lock = threading.Lock()


def add(job: JobHandle[Any]) -> None:
    """Keep a job that runs, whoever drops its handle."""
    _stop_at_end()
    with _lock:
        _running.add(job)


def discard(job: JobHandle[Any]) -> None:
    """Let go of a job that has ended."""
    with _lock:
        _running.discard(job)


def remove_with(job: JobHandle[Any], folder: Path | None) -> weakref.finalize[..., Any]:
    """Return what removes a job's folder: when called, with the handle, or at exit."""
    return weakref.finalize(job, _remove, folder, os.getpid())


def _remove(folder: Path | None, owner: int) -> None:
    if folder is None or os.getpid() != owner:
        return
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)


def _stop_all() -> None:
    """Stop what still runs, all at once, and wait for it."""
    with _lock:
        left = list(_running)
    for job in left:
        job.stop()
    for job in left:
        job.close()


def _forget() -> None:
    """In a forked process: close what would keep the launchers from seeing our parent's end."""
    global _lock
    for job in _running:
        job.forget()
    _running.clear()
    _lock = threading.Lock()


@functools.cache
def _stop_at_end() -> None:
    """Have jobs stopped at exit: before folders are removed, since that was registered before."""
    atexit.register(_stop_all)
    os.register_at_fork(after_in_child=_forget)
