"""What the kernel may forbid about the memory of other processes."""

from __future__ import annotations

import ctypes
import errno
import os

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
