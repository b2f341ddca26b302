"""A cache of pictures in memory that an instance shares with its loading processes.

The cache makes reading faster, but does not change its results. Its size is limited to half of the
memory that is free at the start, divided by the number of instances on the host. The cache also
stops growing when less than a tenth of the machine's memory is free. It does not consider the
memory limit of a container.
"""

from __future__ import annotations

import mmap
import multiprocessing
import sys

import numpy as np
import psutil

__all__ = ["Cache"]

_SHARE = 0.5  # share of the memory that is free at the start
_RESERVE = 0.1  # share of all memory that stays free
_NOTHING = -1  # label of a picture that is not in the cache


class Cache:
    """Decoded pictures by their index. Processes that this process forks share the cache.

    Args:
        count: The number of pictures of the data set.
        instances: The number of instances of this host that have a cache.
        most: The greatest number of bytes; by default half of the free memory.
        speaks: Whether this process prints a line when the cache is full.
    """

    def __init__(
        self, count: int, instances: int = 1, most: int | None = None, *, speaks: bool = True
    ) -> None:
        if most is None:
            most = int(psutil.virtual_memory().available * _SHARE / instances)
        self._speaks = speaks
        self._bytes = _shared(most)
        entries = np.frombuffer(mmap.mmap(-1, 32 * (count + 1)), np.int64)
        self._entries = entries[: 4 * count].reshape(count, 4)  # label, offset, height, width
        self._entries[:, 0] = _NOTHING
        self._state = entries[4 * count :]  # pictures, bytes, whether the cache is full
        self._lock = multiprocessing.Lock()

    def __len__(self) -> int:
        return int(self._state[0])

    def get(self, index: int) -> tuple[np.ndarray, int] | None:
        """Return a picture [height, width, 3] and its label, if the cache has it."""
        label, offset, height, width = self._entries[index].tolist()
        if label == _NOTHING:
            return None
        kept = np.frombuffer(self._bytes, np.uint8, 3 * height * width, offset)
        return kept.reshape(height, width, 3), label

    def put(self, index: int, picture: np.ndarray, label: int) -> None:
        """Add a picture [height, width, 3] and its label, if the cache is not full."""
        with self._lock:
            if self._state[2] or self._entries[index, 0] != _NOTHING:
                return
            begin = int(self._state[1])
            if begin + picture.nbytes > len(self._bytes) or self._memory_is_short():
                self._stop()
                return
            self._bytes[begin : begin + picture.nbytes] = picture.tobytes()
            self._entries[index, 1:] = begin, *picture.shape[:2]
            self._entries[index, 0] = label  # last, for readers without the lock
            self._state[:2] = self._state[0] + 1, begin + picture.nbytes

    def _memory_is_short(self) -> bool:
        memory = psutil.virtual_memory()
        return memory.available < _RESERVE * memory.total

    def _stop(self) -> None:
        self._state[2] = 1
        if self._speaks:
            sys.stderr.write(
                f"the cache of images has no room for more: {len(self):,} images, "
                f"{self._state[1] / 2**20:,.0f} MiB, stay in memory, and the others are read from "
                "files each epoch\n"
            )

    def __getstate__(self) -> dict[str, object]:
        """Return only the size: a process that was not forked begins with an empty cache."""
        return {"count": len(self._entries), "most": len(self._bytes), "speaks": self._speaks}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(state["count"], most=state["most"], speaks=state["speaks"])


def _shared(most: int) -> mmap.mmap:
    """Return anonymous memory that processes share if they are forked later."""
    try:
        return mmap.mmap(-1, max(most, mmap.PAGESIZE))
    except (OSError, OverflowError):  # a system without memory overcommitment
        return mmap.mmap(-1, mmap.PAGESIZE)
