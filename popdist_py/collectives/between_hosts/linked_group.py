"""The seam between hosts: what a communicator asks of the instances that a network connects.

Nothing here is an implementation: those are over MPI (``polled_mpi``) and over sockets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.rounds import Round
from popdist_py.collectives.signature import Signature
from popdist_py.collectives.tree import Node
from popdist_py.errors import InstanceLostError

__all__ = ["LinkedGroup", "MovingGroup"]


class MovingGroup(Protocol):
    """Some instances of several hosts that send one another values; every call is collective.

    ``call`` is the collective call, as messages name it. All calls raise InstanceLostError if
    another instance ended or does not arrive in time.
    """

    @property
    def rank(self) -> int:
        """Index of this instance in the group."""

    @property
    def size(self) -> int:
        """Number of instances in the group."""

    lost_error: InstanceLostError | None
    """The error of the wait that failed; later calls raise it at once."""

    lost_instance: int
    """Index in the job of the instance that this error names, -1 if it is not known."""

    def broadcast(self, array: Array, root: int, call: object) -> None:
        """Overwrite ``array``, flat, with that of rank ``root``."""

    def broadcast_bytes(self, data: Array, root: int, call: object) -> Array:
        """Return the bytes ``data`` of rank ``root``; what the others pass does not matter."""

    def gather(self, array: Array, root: int, call: object) -> Array | None:
        """Return the equally large ``array`` of every rank, stacked; None but at ``root``."""

    def all_gather(self, array: Array, call: object) -> Array:
        """Return the equally large ``array`` of every rank, stacked."""

    def gather_bytes(
        self, data: Array, call: object, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every rank, which may differ in length.

        With a ``root``, only this rank gets them; the others get None.
        """

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the description of every rank's call, after all have seen that calls differ."""


class LinkedGroup(MovingGroup, Protocol):
    """One instance of each host, that also reduce; ``wait`` and ``close`` are not collective."""

    def start_all_reduce(self, array: Array, op: str) -> Any:
        """Start to reduce ``array``, flat, in place; ``wait`` completes it."""

    def all_reduce(self, array: Array, op: str, call: object) -> None:
        """Reduce ``array`` in place."""

    def start_round(self, one: Round, call: object) -> Any:
        """Start to exchange what a round says; ``wait`` completes it."""

    def wait(self, request: Any, call: object) -> None:
        """Return once ``request`` is complete."""

    def all_gather_nodes(
        self, values: Sequence[Array], nodes: Sequence[Sequence[Node]], call: object
    ) -> dict[Node, Array]:
        """Return the nodes of all ranks, in order of rank, from the sums at this rank's nodes."""

    def compare(self, code: int, number: int, call: object) -> tuple[bool, int]:
        """Return whether all ranks pass the same ``code`` (63 bits), and the largest ``number``."""

    def close(self) -> None:
        """Close the connections."""
