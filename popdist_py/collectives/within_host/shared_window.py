"""Windows: memory that the instances of one host share.

A window has a part for each instance and a common part. The memory of a window is an anonymous file
(memfd). An anonymous file is not in a folder, so the system frees its memory even if the job is
killed. The limits of /dev/shm do not apply to anonymous files. Each page of a window is allocated
on the NUMA node that touches it first.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from popdist_py.collectives.within_host.peer_memory import user_change

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array
    from popdist_py.collectives.interfaces import Meeting

__all__ = ["Window", "WindowError"]


class WindowError(Exception):
    """The instances of this host cannot share memory."""


class Window:
    """Shared memory of the instances in ``local``, which must all call the constructor.

    Args:
        local: The instances of this host.
        num_bytes: Size of every instance's part in bytes.
        common_bytes: Size of the common part in bytes.

    Raises:
        WindowError: The system does not permit shared memory. All instances raise this error.
    """

    def __init__(self, local: Meeting, num_bytes: int, common_bytes: int = 0) -> None:
        self.num_bytes = _whole_pages(num_bytes)
        common = _whole_pages(common_bytes) if common_bytes else 0
        self.memory = _mapped(local, common + local.size * self.num_bytes)
        self.common: Array = self.memory[:common]
        starts = range(common, len(self.memory), self.num_bytes)
        self.parts: list[Array] = [self.memory[start : start + self.num_bytes] for start in starts]


def _whole_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _mapped(local: Meeting, size: int) -> Array:
    """Map one anonymous file of ``size`` bytes into all instances of ``local``."""
    if local.size == 1:  # memory that is not shared with other instances does not need a file
        try:
            return np.frombuffer(mmap.mmap(-1, size), np.uint8)
        except OSError as error:
            raise WindowError(str(error)) from None
    descriptor = -1
    # The path and the name of the shared file, or the text of an error.
    location: Sequence[str] | str = ("", "")
    if local.rank == 0:
        name = f"popdist-{secrets.token_hex(8)}"
        try:
            descriptor = os.memfd_create(name)
            os.ftruncate(descriptor, size)
            location = (f"/proc/{os.getpid()}/fd/{descriptor}", name)
        except OSError as error:
            location = str(error)
    location = local.broadcast(location)
    mapping: Array | str
    try:
        mapping = location if isinstance(location, str) else _open(location[0], location[1], size)
    except PermissionError as error:
        mapping = f"{error}{user_change()}"
    except OSError as error:
        mapping = str(error)
    own_problem = mapping if isinstance(mapping, str) else ""
    problems = [problem for problem in local.all_gather(own_problem) if problem]
    if descriptor >= 0:
        os.close(descriptor)
    if problems or isinstance(mapping, str):
        raise WindowError(problems[0])
    return mapping


def _open(path: str, name: str, size: int) -> Array:
    """Map the file at ``path`` into memory, after checking that it is the expected file.

    The path contains a PID. So it may lead to a different file if the instances are in different
    PID name spaces.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if name not in target:
            raise OSError(
                f"{path} leads to {target}: the instances are in different PID namespaces"
            )
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)
