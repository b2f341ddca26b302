"""Reading and writing the memory of other processes, which the kernel may forbid."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from popdist_py.collectives.within_host.peer_memory import PeerMemory


def test_memory_that_can_only_be_read_does_not_work(monkeypatch):
    def forbidden(*_):
        ctypes.set_errno(errno.EPERM)
        return -1

    memory = PeerMemory()
    assert memory.works_with(os.getpid(), memory.probe_address)
    monkeypatch.setattr(memory, "_write", forbidden)
    assert not memory.works_with(os.getpid(), memory.probe_address)
    with pytest.raises(PermissionError, match="cannot be written"):
        memory.write(os.getpid(), memory.probe_address, np.zeros(8, np.uint8))


def test_a_number_that_was_reused_is_neither_read_nor_written(monkeypatch):
    memory, number = PeerMemory(), np.full(8, 1, np.uint8)
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(peer.pid)
    peer.communicate()
    # This process represents another process that got the PID of the peer.
    monkeypatch.setattr(os, "pidfd_open", lambda _: descriptor)
    memory.works_with(os.getpid(), memory.probe_address)
    for copy in (memory.read, memory.write):
        with pytest.raises(ProcessLookupError, match="has ended"):
            copy(os.getpid(), number.ctypes.data, np.zeros(8, np.uint8))
    assert number.tolist() == [1] * 8
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
def test_a_process_that_changes_its_user_is_told_why_its_memory_is_closed():
    """The kernel protects the memory of a process that changes its user, even from the new user."""
    reader, writer = os.pipe()
    memory = PeerMemory()
    child = os.fork()
    if child == 0:
        try:
            assert memory.works_with(os.getppid(), memory.probe_address)
            os.setgid(65534)
            os.setuid(65534)
            memory.read(os.getppid(), memory.probe_address, np.zeros(8, np.uint8))
        except BaseException as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    assert said.startswith("PermissionError(1, ")
    assert "change the user before popdist_py.init()" in said
    os.close(reader)
    os.close(writer)
