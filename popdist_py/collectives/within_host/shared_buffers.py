"""A registry of the buffers that the instances of a host share.

For an array in a shared buffer, the registry returns the arrays of all instances at the same
offset.

This module does not allocate memory and does not read the elements of arrays.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.within_host.shared_window import Window

__all__ = ["SharedArray", "SharedBuffers"]


_NUMBER_BITS, _OFFSET_BITS = 16, 48


@dataclass(frozen=True, slots=True)
class SharedArray:
    """A flat array in shared memory.

    Attributes:
        location: A 64-bit number made from the number of the buffer and the offset in the buffer.
            Arrays at the same offset of the same buffer have the same location on all instances.
            Buffer numbers repeat after 65,535 buffers.
        views: For each instance of the host, the array at the same offset in that instance's part
            of the buffer.
    """

    location: int
    views: list[Array]


class SharedBuffers:
    """A registry of the shared buffers that are still in use by at least one array.

    Args:
        position: Position of this instance on its host.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._windows: dict[int, tuple[weakref.ref[Array], int]] = {}
        self._count = 0

    def add(self, window: Window) -> Array:
        """Register a new window and return this instance's part of it."""
        self._count += 1
        self._windows[self._count] = (weakref.ref(window.memory), window.num_bytes)
        return window.parts[self._position]

    def find(self, array: Array) -> SharedArray | None:
        """Return ``array`` as a SharedArray; None if ``array`` is not in a shared buffer.

        The buffer is found by the address of ``array``, because ``array`` may be a view of a tensor
        or of another array. ``array`` must be contiguous.
        """
        if not self._windows:
            return None
        address = array.ctypes.data
        for number, (reference, part_bytes) in list(self._windows.items()):
            memory = reference()
            if memory is None:
                del self._windows[number]
                continue
            offset = address - memory.ctypes.data - self._position * part_bytes
            if offset >= 0 and offset + array.nbytes <= part_bytes:
                # Buffer numbers start at 1, because 0 means "no buffer".
                number = 1 + (number - 1) % ((1 << _NUMBER_BITS) - 1)
                location = number << _OFFSET_BITS | offset + 1
                return SharedArray(location, _views(array, memory, offset, part_bytes))
        return None


def _views(array: Array, memory: Array, offset: int, part_bytes: int) -> list[Array]:
    starts = range(offset, memory.size, part_bytes)
    return [memory[start : start + array.nbytes].view(array.dtype) for start in starts]
