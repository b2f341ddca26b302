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
# The bitwise operations are only for torch.distributed; popdist's own functions do not accept them.
AnyReduceOp = Literal[ReduceOp, "band", "bor", "bxor"]


class HostMemory(Protocol):
    """Memory that all instances of a job on one host share.

    All instances must make every call, except ``own_slice``, which does not communicate.
    """

    def common_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return a zeroed buffer in memory that all instances share."""

    def own_slice(self, size: int) -> slice:
        """Return the slice of ``size`` elements that this instance reduces.

        The slices of all instances cover all elements.
        """

    def reduce_slice(self, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Sum ``array`` over all instances, and store only ``own_slice`` of the sum.

        This is a reduce-scatter in place. Elements outside ``own_slice`` are not changed. Other
        instances may read those elements until the next collective call.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """


class HostLinks(Protocol):
    """The connections between hosts, in a job whose instances share memory within each host."""

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The instance indices of each host, one sequence per host."""

    def start_compressed(
        self, array: np.ndarray[Any, Any], compression: Compression, name: str = ""
    ) -> None:
        """Start to sum ``array`` over all instances, in place. This is a collective call.

        Within a host, the arrays are added up as in ``all_reduce``. Between hosts,
        ``compression`` determines the data that is sent. All instances get bit-identical values.
        The caller must not read or change ``array`` before ``finish_compressed`` returns.

        Args:
            array: A flat array of float16 or float32, in memory made by ``gradient_buffer``.
            compression: The compression of this array. Every instance passes its own object; the
                ``name`` of all these objects is the same.
            name: The user's name of the call, for messages.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """

    def finish_compressed(self) -> None:
        """Wait until the oldest unfinished array holds its sum. This is a collective call.

        Arrays finish in the order of their ``start_compressed`` calls. To keep the network busy,
        start the next array before this call.
        """


class Communicator(Protocol):
    """The collective calls of a set of instances. All instances of the set must make every call.

    Arrays are C-contiguous. ``name`` is the user's name of a call, for messages. Every call but
    ``close`` raises CollectiveMismatchError if the instances make different calls, and
    InstanceLostError if an instance has ended or does not make the call in time.
    """

    background: Background
    """Runs calls in the background; a direct call waits for the calls submitted before it."""

    spans_hosts: bool
    """Whether the instances may be on several hosts."""

    @property
    def instances(self) -> Sequence[int]:
        """The indices of this communicator's instances in the job.

        Every ``root`` must be one of these indices.
        """

    @property
    def instance_index(self) -> int:
        """Index of this instance in ``instances``, 0 to ``num_instances`` - 1."""

    @property
    def num_instances(self) -> int:
        """Number of instances in this communicator."""

    @property
    def host_memory(self) -> HostMemory | None:
        """Memory that all instances share; None with one instance, or if ``spans_hosts``."""

    @property
    def host_links(self) -> HostLinks | None:
        """The connections between several hosts. None with one host, or without shared memory."""

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

        Row r of instance i belongs to global replica i * L + r, where L is the number of local
        replicas. The rows are added in the order of one fixed binary tree over the replicas, so the
        bits of the sum do not depend on the number of instances.

        Args:
            leaves: An array of the shape [local replicas, elements], in memory made by
                ``gradient_buffer``.
        """

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed memory; arrays in this memory are reduced fastest.

        The instances of a host share this memory. All instances pass the same size. The memory is
        freed once no array uses it.
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
        """Compare ``signature`` with the other instances; return once all have passed the same."""

    def end_if_interrupted(self, call: str, error: BaseException) -> None:
        """Leave the group if ``error`` came in the middle of a call; later calls raise an error.

        Every collective call of this protocol leaves the group in this case. If a function makes
        several collective calls, it passes an error that comes between two of the calls to this
        method.
        """

    def close(self) -> None:
        """Release memory and connections; further calls do nothing."""


class Meeting(Protocol):
    """A group of processes that exchange small values before they are connected.

    All processes of the group must make every call. Values are JSON values: texts, numbers,
    booleans, None, and lists of them. A tuple may be returned as a list.
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
        """Return a Meeting of the instances that pass the same ``color``, ordered by ``key``."""
