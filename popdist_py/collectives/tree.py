"""The fixed binary tree over replicas or instances, which sets the order of deterministic sums.

The first level adds neighbouring replicas: 0+1, 2+3, and so on. Each further level adds
neighbouring sums in the same way. A node without a neighbour becomes a node of the next level
unchanged. The tree depends only on the number of replicas, not on their distribution over the
instances.

This module does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import numpy as np

from popdist_py.collectives.arithmetic import Array

__all__ = ["Combiner", "Node", "combine", "nodes_of"]

# The node (level, index) is the sum of the leaves from index * 2**level to
# (index + 1) * 2**level - 1.
Node: TypeAlias = tuple[int, int]
Value = TypeVar("Value")


def combine(
    nodes: Mapping[Node, Value], num_leaves: int, add: Callable[[Value, Value], Value]
) -> dict[Node, Value]:
    """Add neighbouring nodes until no pair of neighbours is left.

    Args:
        nodes: Maps nodes of the tree to their values. The nodes have no leaves in common.
        num_leaves: Number of leaves of the whole tree.
        add: The function that returns the sum of a left and a right value.

    Returns:
        The nodes that cannot be combined further, with their values. If the given nodes cover all
        leaves of the tree, only the root remains.
    """
    for level in range((num_leaves - 1).bit_length()):
        merged: dict[Node, Value] = {}
        for (node_level, index), value in nodes.items():
            if node_level != level:
                merged[node_level, index] = value
            elif index % 2:
                if (level, index - 1) not in nodes:
                    merged[node_level, index] = value
            elif (level, index + 1) in nodes:
                merged[level + 1, index // 2] = add(value, nodes[level, index + 1])
            elif (index + 1) << level >= num_leaves:
                merged[level + 1, index // 2] = value
            else:
                merged[node_level, index] = value
        nodes = merged
    return dict(nodes)


def nodes_of(held_leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """Return the nodes of the tree that remain when ``combine`` adds the leaves ``held_leaves``."""
    return list(combine({(0, leaf): None for leaf in held_leaves}, num_leaves, lambda *_: None))


class Combiner:
    """Combines pairs of arrays, and reuses its own buffers for the results.

    The caller's arrays are not changed.

    Args:
        dtype: Dtype of the arrays.
        size: Number of elements of the largest array.
        function: The NumPy function that combines two elements.
    """

    def __init__(self, dtype: np.dtype[np.generic], size: int, function: np.ufunc = np.add) -> None:
        self._dtype = dtype
        self._size = size
        self._function = function
        self._buffers: list[Array] = []
        self._results: dict[int, Array] = {}

    def start(self) -> None:
        """Allow this object to reuse the buffers of its earlier results."""
        self._results.clear()

    def __call__(self, left: Array, right: Array) -> Array:
        """Return the combination of two arrays of at most ``size`` elements.

        The returned array is valid until the next call of ``start()``. If an operand is itself an
        earlier result of this object, the operand may be overwritten.
        """
        if id(left) in self._results:
            out = left
        elif id(right) in self._results:
            out = right
        else:
            out = self._new_result(left.size)
        self._function(left, right, out=out)
        return out

    def _new_result(self, size: int) -> Array:
        if len(self._results) == len(self._buffers):
            self._buffers.append(np.empty(self._size, self._dtype))
        out = self._buffers[len(self._results)][:size]
        self._results[id(out)] = out
        return out
