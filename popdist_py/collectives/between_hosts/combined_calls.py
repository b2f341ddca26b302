"""Calls of a group of hosts that are made of its others, and the words of its errors.

Nothing here sends anything itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from popdist_py import activities
from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.signature import INSTANCES, Names, Signature
from popdist_py.collectives.sized_broadcast import sized_broadcast
from popdist_py.collectives.tree import Node
from popdist_py.errors import InstanceLostError

__all__ = ["CombinedCalls", "late_error"]


class CombinedCalls(ABC):
    """What every group of hosts does in the same way; see ``linked_group.LinkedGroup``."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, array: Array, op: str, call: object) -> None:
        """Reduce ``array`` in place."""

    @abstractmethod
    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite ``array``, flat, with that of rank ``root``."""

    @abstractmethod
    def all_gather(self, array: Array, call: object) -> Array:
        """Return the equally large ``array`` of every rank, stacked."""

    @abstractmethod
    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every rank, which may differ in length.

        With a ``root``, only this rank gets them; the others get None.
        """

    def broadcast_bytes(self, data: Array, root: int, call: object) -> Array:
        """Return the bytes ``data`` of rank ``root``; what the others pass does not matter."""
        return sized_broadcast(
            lambda flat: self.broadcast(flat, root, call), data, is_root=self.rank == root
        )

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the description of every rank's call, after all have seen that calls differ."""
        rows = self.gather_bytes(np.frombuffer(signature.description.encode(), np.uint8), signature)
        return [row.tobytes().decode() for row in rows or ()]

    def all_gather_nodes(
        self, values: Sequence[Array], nodes: Sequence[Sequence[Node]], call: object
    ) -> dict[Node, Array]:
        """Return the nodes of all ranks, in order of rank.

        Args:
            values: the sums at this rank's nodes, equally large.
            nodes: the nodes of every rank.
            call: the collective call, as messages name it.
        """
        return _nodes_by_rank(self.all_gather(_stacked_nodes(values, nodes), call), nodes)

    def compare(self, code: int, number: int, call: object) -> tuple[bool, int]:
        """Return whether all ranks pass the same ``code`` (63 bits), and the largest ``number``."""
        extremes = np.array([code, -code, number], np.int64)
        # So few numbers travel in no time: what takes long here is that others are not there yet.
        with activities.doing(activities.WAITING):
            self.all_reduce(extremes, "max", call)
        return bool(extremes[0] == -extremes[1]), int(extremes[2])


def late_error(
    missing: Sequence[int], call: object, hang_timeout: float, names: Names = INSTANCES
) -> InstanceLostError:
    """Return the error of a wait that took too long for these instances."""
    limit = f"within {hang_timeout:g} s ({names.time_limit})"
    if not missing:
        return InstanceLostError(f"{call}: all {names.noun}s arrived, but did not end {limit}")
    return InstanceLostError(f"{call}: {names.of(*sorted(missing))} did not arrive {limit}")


def _stacked_nodes(values: Sequence[Array], nodes: Sequence[Sequence[Node]]) -> Array:
    """Return the values of a rank as rows, as many as the rank with most nodes has."""
    rows = np.zeros((max(map(len, nodes)), values[0].size), values[0].dtype)
    for row, value in zip(rows, values, strict=False):
        row[:] = value
    return rows


def _nodes_by_rank(gathered: Array, nodes: Sequence[Sequence[Node]]) -> dict[Node, Array]:
    """Return the nodes of all ranks from their rows, in order of rank."""
    return {
        node: gathered[rank, row]
        for rank, rank_nodes in enumerate(nodes)
        for row, node in enumerate(rank_nodes)
    }
