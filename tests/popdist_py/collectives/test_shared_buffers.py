"""The location of an array in shared memory, a number of 64 bits that the instances compare."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from popdist_py.collectives.within_host.shared_buffers import SharedBuffers


def test_locations_have_64_bits_however_many_buffers_there_were():
    buffers, memory, locations = SharedBuffers(0), np.zeros(4096, np.uint8), []
    window = SimpleNamespace(memory=memory, num_bytes=2048, parts=[memory[:2048], memory[2048:]])
    for _ in range(1 << 16):
        buffers.add(window)
        if len(buffers._windows) > 1:  # the program has dropped the previous buffer
            del buffers._windows[min(buffers._windows)]
        if buffers._count < 3 or buffers._count > 65_530:
            found = buffers.find(memory[8:16])
            assert [view.ctypes.data - memory.ctypes.data for view in found.views] == [8, 2056]
            locations.append(found.location)
    assert all(1 << 48 < location < 1 << 64 for location in locations)
    assert locations[0] == locations[-1] != locations[1]
