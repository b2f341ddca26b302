"""The fixed binary tree over the global replica index, in which deterministic sums are added up.

Neighbours 0+1, 2+3, ... are added, then their sums, and so on; one without neighbour passes to the
next level. The tree depends on the number of replicas only, never on who holds which of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import numpy as np

from popdist_py.collectives.arithmetic import Array

__all__ = ["Adder", "Node", "combine", "nodes_of"]

# (level, index): the sum of the leaves index * 2**level to (index + 1) * 2**level - 1.
Node: TypeAlias = tuple[int, int]
Value = TypeVar("Value")


def combine(
    parts: Mapping[Node, Value], leaves: int, add: Callable[[Value, Value], Value]
) -> dict[Node, Value]:
    """Add neighbours for as long as both are among ``parts``.

    Args:
        parts: disjoint nodes of the tree.
        leaves: number of leaves of the whole tree.
        add: returns the sum of a left and a right part.

    Returns:
        What is left: the root alone if ``parts`` covered all leaves.
    """
    for level in range((leaves - 1).bit_length()):
        merged: dict[Node, Value] = {}
        for (at, index), value in parts.items():
            if at != level:
                merged[at, index] = value
            elif index % 2:
                if (level, index - 1) not in parts:
                    merged[at, index] = value
            elif (level, index + 1) in parts:
                merged[level + 1, index // 2] = add(value, parts[level, index + 1])
            elif (index + 1) << level >= leaves:
                merged[level + 1, index // 2] = value
            else:
                merged[at, index] = value
        parts = merged
    return dict(parts)


def nodes_of(held: Iterable[int], leaves: int) -> list[Node]:
    """Return the nodes that are left when a holder of the leaves ``held`` has added what it can."""
    return list(combine({(0, leaf): None for leaf in held}, leaves, lambda *_: None))


class Adder:
    """Adds arrays without changing those it was given: sums live in rows that are used again."""

    def __init__(self, dtype: np.dtype[np.generic], size: int) -> None:
        self._dtype = dtype
        self._size = size
        self._rows: list[Array] = []
        self._used: dict[int, Array] = {}

    def start(self) -> None:
        """Forget the sums of before: their rows may be overwritten."""
        self._used.clear()

    def __call__(self, left: Array, right: Array) -> Array:
        """Return left + right, of at most ``size`` elements, valid until ``start``."""
        if id(left) in self._used:
            return np.add(left, right, out=left)
        if id(right) in self._used:
            return np.add(left, right, out=right)
        if len(self._used) == len(self._rows):
            self._rows.append(np.empty(self._size, self._dtype))
        out = self._rows[len(self._used)][: left.size]
        self._used[id(out)] = out
        return np.add(left, right, out=out)
