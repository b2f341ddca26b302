"""Disk space, shared memory and processes of this host, which a failed job may have used up."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from poprun_py.process_info import process_refusals_and_limit

_SHARED_MEMORY = Path("/dev/shm")
# A file system counts as full if it has less free space than this. MPI needs some megabytes for a
# job, and a program that writes until the disk is full may leave a few bytes.
_MIN_FREE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceShortage:
    """The resources of this host that were used up when an instance or mpirun failed.

    Attributes:
        is_disk_full: Whether the file system of MPI's files was full.
        is_shared_memory_full: Whether /dev/shm was full when an instance got SIGBUS.
        was_process_refused: Whether a process of the launcher's control group could not start
            another process.
        process_limit: The number of processes that the control group allows; 0 if it is unknown.
    """

    is_disk_full: bool = False
    is_shared_memory_full: bool = False
    was_process_refused: bool = False
    process_limit: int = 0


class ShortageCheck:
    """Finds shortages of resources during one attempt at a job.

    Args:
        folder: The folder of MPI's files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = ResourceShortage()
        self._refused_before = 0

    def begin(self) -> None:
        """Note how often the system had refused to start a process before the job."""
        self._refused_before = process_refusals_and_limit()[0]

    def on_failure(self, code: int) -> None:
        """Look for full file systems when the first instance on this host fails with ``code``."""
        self._found = ResourceShortage(
            is_disk_full=is_full(self._folder),
            is_shared_memory_full=code == -signal.SIGBUS and is_full(_SHARED_MEMORY),
        )

    def result(self, *, has_mpirun_failed: bool, was_stopped: bool) -> ResourceShortage:
        """Return the shortages of a job that has ended."""
        found = self._found
        if has_mpirun_failed and not found.is_disk_full:
            # The folder is checked here, because the output of an mpirun that cannot start does not
            # name it.
            found = replace(found, is_disk_full=is_full(self._folder))
        if not (has_mpirun_failed or was_stopped):
            return found
        refused, limit = process_refusals_and_limit()
        was_refused = refused > self._refused_before
        return replace(found, was_process_refused=was_refused, process_limit=limit or 0)


def is_full(folder: Path) -> bool:
    """Whether the file system of ``folder`` is full, or has become read-only."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    # File systems without limits report totals of 0.
    has_no_names = status.f_files > 0 and status.f_favail == 0
    has_no_bytes = status.f_blocks > 0 and status.f_bavail * status.f_frsize < _MIN_FREE_BYTES
    return has_no_names or has_no_bytes or bool(status.f_flag & os.ST_RDONLY)
