"""Memory that the instances of one host share: one part each, and what is common to all.

The memory is an anonymous file (memfd): it has no name, so nothing is left behind by a job that is
killed, and no limit of /dev/shm applies. Pages belong to the NUMA node that touches them first.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

    from popdist_py.collectives.arithmetic import Array

__all__ = ["Window", "WindowError"]


class WindowError(Exception):
    """The instances of this host cannot share memory."""


class Window:
    """Shared memory of the instances in ``local``; making one is collective.

    Args:
        local: the instances of this host.
        num_bytes: size of every instance's part.
        common_bytes: size of the part that belongs to all.

    Raises:
        WindowError: the system does not let them; raised by all of them.
    """

    def __init__(self, local: MPI.Comm, num_bytes: int, common_bytes: int = 0) -> None:
        self.num_bytes = _whole_pages(num_bytes)
        common = _whole_pages(common_bytes) if common_bytes else 0
        self.memory = _mapped(local, common + local.Get_size() * self.num_bytes)
        self.common: Array = self.memory[:common]
        starts = range(common, len(self.memory), self.num_bytes)
        self.parts: list[Array] = [self.memory[at : at + self.num_bytes] for at in starts]


def _whole_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _mapped(local: MPI.Comm, size: int) -> Array:
    """Map one anonymous file of ``size`` bytes into all instances of ``local``."""
    own = -1
    place: tuple[str, str] | str = ("", "")
    if local.Get_rank() == 0:
        name = f"popdist-{secrets.token_hex(8)}"
        try:
            own = os.memfd_create(name)
            os.ftruncate(own, size)
            place = (f"/proc/{os.getpid()}/fd/{own}", name)
        except OSError as error:
            place = str(error)
    place = local.bcast(place, root=0)
    found: Array | str
    try:
        found = place if isinstance(place, str) else _open(*place, size)
    except OSError as error:
        found = str(error)
    problems = [text for text in local.allgather(found if isinstance(found, str) else "") if text]
    if own >= 0:
        os.close(own)
    if problems or isinstance(found, str):
        raise WindowError(problems[0])
    return found


def _open(path: str, name: str, size: int) -> Array:
    """Map the file at ``path``; processes in other name spaces see another one there."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        target = str(Path(f"/proc/self/fd/{file}").readlink())
        if name not in target:
            raise OSError(f"{path} is {target}: the instances do not see one another's processes")
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)
