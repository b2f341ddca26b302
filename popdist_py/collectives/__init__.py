"""Communication between instances: the Communicator protocol and its implementations.

solo.py     one instance: every collective is the identity
shared.py   shared memory within a host, MPI between hosts
mpi.py      MPI alone: for groups of instances, and where memory cannot be shared

NumPy arrays are the common currency here: torch stays outside (a tensor reaches this package as
the array that shares its memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from popdist_py.collectives.background import Background
    from popdist_py.collectives.signature import Signature

__all__ = ["Communicator", "HostMemory", "ReduceOp"]

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]


class HostMemory(Protocol):
    """Memory that all instances of the job share, because one host has them all.

    Its calls are collective, except ``own_slice``.
    """

    def common_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed bytes that are the same memory on all instances."""

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance answers for; together they are all."""

    def reduce_slice(self, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Leave in ``own_slice`` of ``array`` the sum over all instances, the rest as it was.

        Others read this instance's array until the next collective call.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """


class Communicator(Protocol):
    """What an instance needs from the others. Every call is collective: all instances make it.

    Arrays are C-contiguous. ``name`` is the user's name of a call, for messages. Every call but
    ``close`` raises CollectiveMismatchError if the instances make different ones, and
    InstanceLostError if one of them ended or does not arrive.
    """

    background: Background
    """Runs calls beside the program; a call made directly comes after those given to it."""

    spans_hosts: bool
    """Whether the instances may be on several hosts."""

    @property
    def instances(self) -> Sequence[int]:
        """Index in the job of every instance that takes part; ``root`` is one of them."""

    @property
    def instance_index(self) -> int:
        """Index of this instance among those that take part, 0 to ``num_instances`` - 1."""

    @property
    def num_instances(self) -> int:
        """Number of instances I."""

    @property
    def host_memory(self) -> HostMemory | None:
        """What several instances on one host can do together; None if they are not, or may not."""

    def all_reduce(self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` element by element over all instances, in place.

        Every instance ends with bit-identical values. float16 and bfloat16 are added in float32.
        """

    def add_replicas(self, leaves: np.ndarray[Any, Any]) -> None:
        """Leave in ``leaves[0]`` the sum of all rows of all instances, the other rows undefined.

        Row r of instance i belongs to global replica iL + r. The rows are added in the order of one
        fixed binary tree over the replicas, so the bits do not depend on the number of instances.

        Args:
            leaves: [local replicas L, elements], in memory made by ``gradient_buffer``.
        """

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed bytes in which arrays are reduced fastest: shared with the host's others.

        All instances ask for the same size; the memory is given back when no array uses it.
        """

    def broadcast(self, array: np.ndarray[Any, Any], root: int = 0) -> None:
        """Overwrite ``array`` with the one of instance ``root``, in place."""

    def all_gather(self, array: np.ndarray[Any, Any], name: str = "") -> np.ndarray[Any, Any]:
        """Return the arrays of all instances, stacked: [instances, *shape]."""

    def all_gather_object(self, value: object) -> list[Any]:
        """Return the picklable ``value`` of every instance, in instance order."""

    def broadcast_object(self, value: object, root: int = 0) -> Any:
        """Return the picklable ``value`` of instance ``root``."""

    def barrier(self) -> None:
        """Return once every instance has called this."""

    def agree(self, signature: Signature) -> None:
        """Return once every instance makes the call ``signature``."""

    def close(self) -> None:
        """Give back what the communicator holds; calling it again does nothing."""
