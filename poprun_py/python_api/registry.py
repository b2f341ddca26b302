"""The jobs that this process has started and that still run: stopped when it ends.

A process that was forked off has none of them: it must keep neither their channels nor their files.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from typing import Any, Protocol

from poprun_py.instance.job_folders import JobFolder


class RunningJob(Protocol):
    """A job, as far as the end of this process is concerned."""

    def stop(self) -> None:
        """Ask it to end."""

    def close(self) -> None:
        """Stop it if it still runs, wait for its end, and remove its files."""

    def forget(self) -> None:
        """Close what a forked process has inherited of it."""


_running: set[RunningJob] = set()
_lock = threading.Lock()


def add(job: RunningJob) -> None:
    """Keep a job that runs, whoever drops its handle."""
    _stop_at_end()
    with _lock:
        _running.add(job)


def discard(job: RunningJob) -> None:
    """Let go of a job that has ended."""
    with _lock:
        _running.discard(job)


def remove_with(job: RunningJob, folder: JobFolder | None) -> weakref.finalize[..., Any]:
    """Return what removes a job's folder: when called, with the handle, or at exit."""
    return weakref.finalize(job, _remove, folder, os.getpid())


def _remove(folder: JobFolder | None, owner: int) -> None:
    if folder is not None and os.getpid() == owner:
        folder.remove()


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
