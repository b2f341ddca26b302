"""Which arrays live in shared memory, and where the other instances of the host have theirs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.within_host.shared_window import Window

__all__ = ["Buffers", "Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """A flat array in shared memory.

    Attributes:
        number: says where in which buffer it lies; equal on all instances for equal places.
        views: what lies at that place in the part of every instance of the host.
    """

    number: int
    views: list[Array]


class Buffers:
    """The windows that were given out, for as long as somebody uses them.

    Args:
        position: of this instance among those of its host.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._windows: dict[int, tuple[weakref.ref[Array], int]] = {}
        self._count = 0

    def add(self, window: Window) -> Array:
        """Remember a new window and return this instance's part of it."""
        self._count += 1
        self._windows[self._count] = (weakref.ref(window.memory), window.num_bytes)
        return window.parts[self._position]

    def find(self, array: Array) -> Found | None:
        """Return where a contiguous array lies, None if it is no part of a window.

        Addresses decide: the array may come from a tensor or another view of the same memory.
        """
        if not self._windows:
            return None
        address = array.ctypes.data
        for number, (reference, part) in list(self._windows.items()):
            memory = reference()
            if memory is None:
                del self._windows[number]
                continue
            offset = address - memory.ctypes.data - self._position * part
            if offset >= 0 and offset + array.nbytes <= part:
                return Found(number << 48 | offset + 1, _views(array, memory, offset, part))
        return None


def _views(array: Array, memory: Array, offset: int, part: int) -> list[Array]:
    starts = range(offset, memory.size, part)
    return [memory[start : start + array.nbytes].view(array.dtype) for start in starts]
