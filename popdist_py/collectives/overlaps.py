"""Whether elements share memory, within an array and between arrays: by address, shape and strides.

A reduction in place would change such an element twice. Nothing here reads what arrays hold.
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
    """Where the elements of an array lie.

    Attributes:
        address: of the first element.
        shape: of the array.
        strides: from one element to the next of each dimension, in bytes.
        itemsize: bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """The addresses between which all elements lie; both equal without elements."""
        if 0 in self.shape:
            return self.address, self.address
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(step for step in steps if step < 0)
        high = sum(step for step in steps if step > 0)
        return self.address + low, self.address + high + self.itemsize

    def bytes_at(self, unit: int) -> Array:
        """Return the address of every ``unit`` bytes of every element, in any order."""
        found = np.array([self.address], np.int64)
        extents = [*zip(self.shape, self.strides, strict=True), (self.itemsize // unit, unit)]
        for size, stride in extents:
            found = (found[:, None] + np.arange(size) * stride).reshape(-1)
        return found


def elements_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether two elements of one array are the same memory, as after ``expand()``.

    Args:
        shape: of the array.
        strides: of each dimension, in elements.
    """
    if 0 in shape:
        return False
    pairs = sorted(
        (abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1
    )
    reach = 0  # the farthest element of the dimensions before
    for stride, size in pairs:
        if stride <= reach:
            return _has_equal(Place(0, tuple(shape), tuple(strides), 1))
        reach += stride * (size - 1)
    return any(stride == 0 for stride, _ in pairs)


def _has_equal(place: Place) -> bool:
    """Look at every element: dimensions may be interleaved without an element in common."""
    addresses = place.bytes_at(1)
    return len(np.unique(addresses)) < len(addresses)


def first_overlap(places: Sequence[Place]) -> tuple[int, int] | None:
    """Return the numbers of two arrays that have memory in common; None if none have."""
    spans = sorted((*place.span, number) for number, place in enumerate(places))
    open_spans: list[tuple[int, int]] = []  # those that may reach the next one: end and number
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
