"""The protocols of collective communication: Communicator, Meeting, HostMemory and HostLinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from popdist_py.collectives.background import Background
    from popdist_py.collectives.compression_rounds import Compression
    from popdist_py.collectives.signature import Signature

__all__ = ["AnyReduceOp", "Communicator", "HostLinks", "HostMemory", "Meeting", "ReduceOp"]

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]
# torch.distributed also offers bitwise operations. The library's own calls do not.
AnyReduceOp = Literal[ReduceOp, "band", "bor", "bxor"]


class HostMemory(Protocol):
    """Memory that all instances of a job on one host share.

    Its calls are collective, except ``own_slice``.
    """

    def common_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed bytes that are the same memory on all instances."""

    def own_slice(self, size: int) -> slice:
        """Return the slice of ``size`` elements that this instance reduces.

        The slices of all instances cover all elements.
        """

    def reduce_slice(self, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Write the sum over all instances to ``own_slice`` of ``array`` (reduce-scatter).

        The rest of ``array`` is not changed. Other instances read it until the next collective
        call.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """


class HostLinks(Protocol):
    """The connections between hosts, in a job whose instances share memory within each host."""

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """For each host, the indices in the job of its instances."""

    def start_compressed(
        self, array: np.ndarray[Any, Any], compression: Compression, name: str = ""
    ) -> None:
        """Start to sum ``array`` over all instances, in place; collective.

        Within a host the arrays are added up as in ``all_reduce``. ``compression`` determines the
        data that the hosts send one another. All instances get bit-identical values. The caller
        must not read or change the array before ``finish_compressed`` returns.

        Args:
            array: A flat array of float16 or float32, in memory made by ``gradient_buffer``.
            compression: The compression of this array. Every instance has its own compression
                object of the same name.
            name: The user's name of the call, for messages.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """

    def finish_compressed(self) -> None:
        """Return once the oldest started array that is not finished holds its sum; collective.

        The network stays busy if the next array is started before this call.
        """


class Communicator(Protocol):
    """The collectives of a set of instances. All of these instances must make every call.

    Arrays are C-contiguous. ``name`` is the user's name of a call, for messages. Every call but
    ``close`` raises CollectiveMismatchError if the instances make different calls. It raises
    InstanceLostError if an instance has ended or does not make the call in time.
    """

    background: Background
    """Runs calls in the background; a direct call waits for the calls submitted before it."""

    spans_hosts: bool
    """Whether the instances may be on several hosts."""

    @property
    def instances(self) -> Sequence[int]:
        """Index in the job of every instance that takes part; ``root`` is one of these indices."""

    @property
    def instance_index(self) -> int:
        """Index of this instance in ``instances``, 0 to ``num_instances`` - 1."""

    @property
    def num_instances(self) -> int:
        """Number of instances I."""

    @property
    def host_memory(self) -> HostMemory | None:
        """Memory that all instances share; None with one instance, or if ``spans_hosts``."""

    @property
    def host_links(self) -> HostLinks | None:
        """The connections between several hosts; None where instances share no memory on a host."""

    def all_reduce(self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` element by element over all instances, in place.

        All instances get bit-identical values. float16 and bfloat16 are added up in float32.
        """

    def reduce_scatter(
        self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = ""
    ) -> np.ndarray[Any, Any]:
        """Return this instance's block of the first dimension of the reduced ``array``.

        Args:
            array: The array to reduce, which is not changed. The size of its first dimension is a
                multiple of the number of instances.
            op: The operation.
            name: The user's name of the call.
        """

    def add_replicas(self, leaves: np.ndarray[Any, Any]) -> None:
        """Write the sum of all rows of all instances to ``leaves[0]``; other rows are undefined.

        Row r of instance i belongs to global replica iL + r. The rows are added in the order of one
        fixed binary tree over the replicas, so the bits do not depend on the number of instances.

        Args:
            leaves: An array of the shape [local replicas L, elements], in memory made by
                ``gradient_buffer``.
        """

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed memory; arrays in this memory are reduced fastest.

        The instances of a host share this memory. All instances pass the same size. The memory is
        freed once it is not used by any array.
        """

    def broadcast(self, array: np.ndarray[Any, Any], root: int = 0, name: str = "") -> None:
        """Overwrite ``array`` with the array of instance ``root``."""

    def all_gather(self, array: np.ndarray[Any, Any], name: str = "") -> np.ndarray[Any, Any]:
        """Return the arrays of all instances as one array of the shape [instances, *shape]."""

    def gather(
        self, array: np.ndarray[Any, Any], root: int = 0, name: str = ""
    ) -> np.ndarray[Any, Any] | None:
        """Return the result of ``all_gather`` on instance ``root``, and None on the others."""

    def all_gather_object(self, value: object, name: str = "") -> list[Any]:
        """Return the picklable ``value`` of every instance, in instance order."""

    def gather_object(self, value: object, root: int = 0, name: str = "") -> list[Any] | None:
        """Return the result of ``all_gather_object`` on ``root``, and None on the others."""

    def broadcast_object(self, value: object, root: int = 0, name: str = "") -> Any:
        """Return the picklable ``value`` of instance ``root``."""

    def barrier(self) -> None:
        """Return once every instance has called this."""

    def agree(self, signature: Signature) -> None:
        """Return once every instance makes the call ``signature``."""

    def close(self) -> None:
        """Release memory and connections; further calls do nothing."""


class Meeting(Protocol):
    """A group of instances that exchange small values; every call is collective.

    Values are JSON values: texts, numbers, booleans, None, and lists of them. A tuple may be
    returned as a list.
    """

    @property
    def rank(self) -> int:
        """Index of this instance in the group."""

    @property
    def size(self) -> int:
        """Number of instances in the group."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every instance, in order of rank."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""

    def split(self, color: int, key: int) -> Meeting:
        """Return the meeting of the instances that pass the same ``color``, ordered by ``key``."""
