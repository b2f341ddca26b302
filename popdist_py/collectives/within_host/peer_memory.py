"""Reading the memory of another process of the same user and host, without its help.

One copy instead of two through shared memory. The kernel may forbid it (other users, hardened
systems): ``PeerMemory.works_with`` finds out.
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


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class PeerMemory:
    """This process's way into the memory of its peers, and theirs into its own."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # Where only parents may look into a process (Yama), a process may invite others.
        libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
        self._read = libc.process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (
            ctypes.c_int,
            ctypes.POINTER(_Range),
            ctypes.c_ulong,
            ctypes.POINTER(_Range),
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
        self._probe = ctypes.c_uint64(_PROBE)

    @property
    def probe_address(self) -> int:
        """Where peers find a number that they know."""
        return ctypes.addressof(self._probe)

    def works_with(self, pid: int, probe_address: int) -> bool:
        """Tell whether the memory of a peer can be read."""
        found = ctypes.c_uint64()
        try:
            self._copy(pid, probe_address, ctypes.addressof(found), 8)
        except OSError:
            return False
        return found.value == _PROBE

    def read(self, pid: int, address: int, out: Array) -> None:
        """Fill ``out`` with what lies at ``address`` in a peer.

        Raises:
            OSError: the peer ended, or the kernel forbids it.
        """
        self._copy(pid, address, out.ctypes.data, out.nbytes)

    def _copy(self, pid: int, source: int, target: int, size: int) -> None:
        done = 0
        while done < size:
            here, there = _Range(target + done, size - done), _Range(source + done, size - done)
            count = self._read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process {pid} cannot be read: {os.strerror(code)}")
            done += count
