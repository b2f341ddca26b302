"""Checks for elements that share memory, within one array and between arrays.

If two elements share memory, a reduction in place would change this memory twice. The checks use
addresses, shapes and strides only; they do not read the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from popdist_py.collectives.arithmetic import Array

__all__ = ["Place", "elements_overlap", "first_overlap"]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of an array's elements in memory.

    Attributes:
        address: Address of the first element.
        shape: Shape of the array.
        strides: Distance between neighbouring elements in each dimension, in bytes.
        itemsize: Bytes of one element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """The lowest address of the array's bytes, and the address after the highest.

        The two addresses are equal if the array has no elements.
        """
        if 0 in self.shape:
            return self.address, self.address
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(step for step in steps if step < 0)
        high = sum(step for step in steps if step > 0)
        return self.address + low, self.address + high + self.itemsize

    def bytes_at(self, unit: int) -> Array:
        """Divide each element into pieces of ``unit`` bytes; return the address of each piece."""
        found = np.array([self.address], np.int64)
        extents = [*zip(self.shape, self.strides, strict=True), (self.itemsize // unit, unit)]
        for size, stride in extents:
            found = (found[:, None] + np.arange(size) * stride).reshape(-1)
        return found


def elements_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether two elements of the same array share memory, as after torch's ``expand()``.

    Args:
        shape: Shape of the array.
        strides: For each dimension, the distance between neighbouring elements, counted in
            elements.
    """
    if 0 in shape:
        return False
    pairs = sorted(
        (abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1
    )
    reach = 0  # offset of the farthest element in the dimensions seen so far
    for stride, size in pairs:
        if stride <= reach:
            return _has_equal(Place(0, tuple(shape), tuple(strides), 1))
        reach += stride * (size - 1)
    return any(stride == 0 for stride, _ in pairs)


def _has_equal(place: Place) -> bool:
    """Compare the addresses of all elements, and tell whether two of them are equal."""
    addresses = place.bytes_at(1)
    return len(np.unique(addresses)) < len(addresses)


def first_overlap(places: Sequence[Place]) -> tuple[int, int] | None:
    """Return the indices of two arrays that share memory; None if all are disjoint."""
    spans = sorted((*place.span, number) for number, place in enumerate(places))
    # The end address and the index of each earlier span that may overlap the current span.
    open_spans: list[tuple[int, int]] = []
    for begin, end, number in spans:
        if begin == end:
            continue
        open_spans = [(other_end, other) for other_end, other in open_spans if other_end > begin]
        for _, other in open_spans:
            if _have_common(places[other], places[number]):
                return min(other, number), max(other, number)
        open_spans.append((end, number))
    return None


def _have_common(one: Place, other: Place) -> bool:
    unit = math.gcd(one.itemsize, other.itemsize)
    return bool(np.intersect1d(one.bytes_at(unit), other.bytes_at(unit)).size)
