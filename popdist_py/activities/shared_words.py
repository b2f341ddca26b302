"""The memory that this instance shares with the launcher's wrapper, as whole numbers of 8 bytes.

Nothing here knows what a word means: that is the matter of ``heartbeat.py`` and ``ledger.py``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from popdist_py import environment

__all__ = ["map_words"]


def map_words(count: int) -> memoryview:
    """Return the first ``count`` words of that memory.

    They are private where no wrapper made any, or one of another version made less, or it is on
    another host: the instance then runs without being watched.
    """
    memory = mmap.mmap(-1, 8 * count)
    path = os.environ.get(environment.HEARTBEAT)
    if path:
        with contextlib.suppress(OSError, ValueError), Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 8 * count)
    return memoryview(memory).cast("q")
