"""Reading the memory of another process of the same user and host, without its help.

A read is one copy; passing through shared memory takes two. The kernel may forbid reads (other
users, hardened systems): ``PeerMemory.works_with`` tells. Nothing here waits for a peer.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array

__all__ = ["PeerMemory"]

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)
_PROBE = 0x706F7064697374


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class PeerMemory:
    """Reads the memory of peers, and permits peers to read this process's memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # Where only a parent may read a process (Yama), the process itself may permit others.
        libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
        self._read = libc.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (
            ctypes.c_int,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
        self._probe = ctypes.c_uint64(_PROBE)

    @property
    def probe_address(self) -> int:
        """Address of a number whose value all peers know."""
        return ctypes.addressof(self._probe)

    def works_with(self, pid: int, probe_address: int) -> bool:
        """Tell whether the memory of a peer can be read."""
        number = ctypes.c_uint64()
        try:
            self._copy(pid, probe_address, ctypes.addressof(number), 8)
        except OSError:
            return False
        return number.value == _PROBE

    def read(self, pid: int, address: int, out: Array) -> None:
        """Fill ``out`` with the bytes at ``address`` of a peer.

        Raises:
            OSError: the peer ended, or the kernel forbids the read.
        """
        self._copy(pid, address, out.ctypes.data, out.nbytes)

    def _copy(self, pid: int, source: int, target: int, size: int) -> None:
        copied = 0
        while copied < size:
            local = _IoVec(target + copied, size - copied)
            remote = _IoVec(source + copied, size - copied)
            count = self._read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process {pid} cannot be read: {os.strerror(code)}")
            copied += count
