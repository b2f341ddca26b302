"""Folders of jobs that nobody is left to remove: a lock of the kernel tells whose owner lives.

Where the program and its launcher were killed at once, the next start of the same user removes
them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

__all__ = ["PREFIX", "hold", "sweep"]

PREFIX = "poprun_job-"
# A folder is locked as soon as its launcher is started: a younger one may not be yet.
_LEFT_AFTER_SECONDS = 3600.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def hold(folder: Path) -> int | None:
    """Return a descriptor that keeps a folder from being swept while it is open.

    None where folders cannot be locked; there nothing is swept either.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, _FOLDER)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def sweep(base: Path) -> None:
    """Remove the folders in ``base`` that this user's programs have left."""
    from shutil import rmtree

    with contextlib.suppress(OSError):
        for folder in base.glob(f"{PREFIX}*"):
            if _is_left(folder):
                rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _LEFT_AFTER_SECONDS:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
