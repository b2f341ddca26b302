"""Direct access to the memory of another process (a peer) of the same user on the same host.

Direct access copies the data once, and the peer does not take part in the copy. A transfer through
shared memory copies the data twice. On hardened systems, and for processes of other users, the
kernel forbids direct access. ``PeerMemory.works_with`` tests whether direct access is permitted.
This module never waits for a peer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array

__all__ = ["PeerMemory", "user_change"]

_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)
_PROBE = 0x706F7064697374


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def user_change(pid: int | str = "self") -> str:
    """Return a hint if this process or the process ``pid`` has changed its user; otherwise "".

    The caller appends the hint to the kernel's error message. If a process has changed its user or
    group, root owns the files of the process in /proc. Other processes of the user cannot access
    the memory and descriptors of such a process.

    Args:
        pid: The process whose memory or file could not be opened.
    """
    for process in ("self", pid):
        with suppress(OSError):
            if Path(f"/proc/{process}/fd").stat().st_uid != os.geteuid():
                return (
                    ". After os.setuid() or os.setgid(), other instances cannot access the memory "
                    "of a process: change the user before popdist_py.init()"
                )
    return ""


class PeerMemory:
    """Reads and writes the memory of peers, and permits peers to access this process's memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # The kernel's Yama module may let only the parent access a process. This call of prctl
        # permits all processes of the user to access this process.
        libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
        self._read, self._write = libc.process_vm_readv, libc.process_vm_writev
        for function in (self._read, self._write):
            function.restype = ctypes.c_ssize_t
            function.argtypes = (
                ctypes.c_int,
                ctypes.POINTER(_IoVec),
                ctypes.c_ulong,
                ctypes.POINTER(_IoVec),
                ctypes.c_ulong,
                ctypes.c_ulong,
            )
        self._probe = ctypes.c_uint64(_PROBE)
        self._pidfds: list[int] = []
        self._ended: dict[int, select.poll] = {}
        # The arguments of the system calls are allocated only once, because allocating them takes
        # as long as copying several pages of memory. All copies use the same argument objects, so
        # only one thread may copy at a time.
        self._local, self._remote = _IoVec(), _IoVec()
        self._vectors = ctypes.byref(self._local), 1, ctypes.byref(self._remote), 1, 0

    @property
    def probe_address(self) -> int:
        """The address of a number that peers read to test their access to this process's memory."""
        return ctypes.addressof(self._probe)

    def works_with(self, pid: int, probe_address: int) -> bool:
        """Tell whether this process can read and write the memory of a running peer."""
        number = ctypes.c_uint64()
        try:
            self._watch(pid)
            self._copy(self._read, pid, probe_address, ctypes.addressof(number), 8)
            if number.value != _PROBE:
                return False
            # The test also writes, because a seccomp profile may permit only reading. The test
            # writes back the number that it has read, so the memory of the peer does not change.
            self._copy(self._write, pid, probe_address, ctypes.addressof(number), 8)
        except OSError:
            return False
        return True

    def read(self, pid: int, address: int, out: Array) -> None:
        """Fill ``out`` with the bytes at ``address`` in the memory of a peer.

        Raises:
            ProcessLookupError: The peer has ended.
            OSError: The kernel forbids the read.
        """
        self.read_bytes(pid, address, out.ctypes.data, out.nbytes)

    def write(self, pid: int, address: int, data: Array) -> None:
        """Copy ``data`` to ``address`` in a peer. Raises the same errors as ``read``."""
        self.write_bytes(pid, address, data.ctypes.data, data.nbytes)

    def read_bytes(self, pid: int, address: int, own_address: int, size: int) -> None:
        """Copy ``size`` bytes of a peer to ``own_address``. Raises the same errors as ``read``."""
        self._copy(self._read, pid, address, own_address, size)

    def write_bytes(self, pid: int, address: int, own_address: int, size: int) -> None:
        """Copy ``size`` bytes at ``own_address`` to a peer. Raises the same errors as ``read``."""
        self._copy(self._write, pid, address, own_address, size)

    def close(self) -> None:
        """Close the pidfds of the peers. A closed object cannot read or write memory."""
        self._ended.clear()
        while self._pidfds:
            os.close(self._pidfds.pop())

    def _watch(self, pid: int) -> None:
        """Open a pidfd of a peer, to notice the end of the peer even if the PID is reused."""
        if pid not in self._ended:
            self._pidfds.append(os.pidfd_open(pid))
            self._ended[pid] = select.poll()
            self._ended[pid].register(self._pidfds[-1], select.POLLIN)

    def _copy(
        self, function: Callable[..., int], pid: int, peer_address: int, own_address: int, size: int
    ) -> None:
        copied, local, remote = 0, self._local, self._remote
        ended = self._ended[pid]
        while copied < size:
            # The PID of an ended peer may already belong to another process.
            if ended.poll(0):
                raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
            local.address, remote.address = own_address + copied, peer_address + copied
            local.size = remote.size = size - copied
            count = function(pid, *self._vectors)
            if count <= 0:
                code = ctypes.get_errno()
                way = "read" if function is self._read else "written"
                raise OSError(
                    code,
                    f"memory of process {pid} cannot be {way}: {os.strerror(code)}"
                    f"{user_change(pid)}",
                )
            copied += count
