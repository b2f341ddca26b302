"""The memory that this instance shares with the launcher's wrapper, as integers of 8 bytes.

The modules ``heartbeat.py`` and ``ledger.py`` define the meaning of the integers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from popdist_py import environment


def map_words(count: int) -> memoryview:
    """Return the first ``count`` integers of the shared memory.

    Without usable shared memory, the returned memory is private. The reason may be that there is no
    wrapper, that a wrapper of another version made the memory too small, or that the wrapper is on
    another host. The launcher does not watch an instance with private memory.
    """
    memory = mmap.mmap(-1, 8 * count)
    path = os.environ.get(environment.HEARTBEAT)
    if path:
        with contextlib.suppress(OSError, ValueError), Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 8 * count)
    return memoryview(memory).cast("q")
