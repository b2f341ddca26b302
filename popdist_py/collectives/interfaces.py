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
    """The shared memory of all instances, for a job that runs on a single host.

    All instances must make every call, except ``own_slice``, which does not communicate.
    """

    def common_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return a zeroed buffer in memory that all instances share."""

    def own_slice(self, size: int) -> slice:
        """Return this instance's slice of an array with ``size`` elements.

        Each instance reduces its own slice. The slices of all instances together cover the array.
        """

    def reduce_slice(self, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Sum ``array`` over all instances, and store only this instance's slice of the sum.

        This is a reduce-scatter in place. Elements outside ``own_slice`` are not changed. Other
        instances may read the elements outside ``own_slice`` until the next collective call.

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

        Within a host, the arrays are added up as in ``all_reduce``. Between hosts, the instances
        send data that ``compression`` has compressed. All instances get bit-identical results. The
        caller must not read or change ``array`` before ``finish_compressed`` returns.

        Args:
            array: A flat array of float16 or float32, in memory made by ``gradient_buffer``.
            compression: The object that compresses this array. Every instance passes its own
                compression object, and all of these objects have the same ``name``.
            name: A name that the user gave the call; error messages contain it.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """

    def finish_compressed(self) -> None:
        """Wait until the oldest unfinished compressed sum is complete. This is a collective call.

        Sums finish in the order of their ``start_compressed`` calls. To keep the network busy, call
        ``start_compressed`` for the next array before ``finish_compressed``.
        """


class Communicator(Protocol):
    """The collective calls of a set of instances. All instances of the set must make every call.

    Arrays are C-contiguous. The argument ``name`` is a name that the user gave the call; error
    messages contain it. Every method except ``close`` raises CollectiveMismatchError if the
    instances make different calls. If an instance has ended or does not make the call in time,
    these methods raise InstanceLostError.
    """

    background: Background
    """Runs calls in the background; a direct call waits for the calls submitted before it."""

    spans_hosts: bool
    """Whether the instances may be on several hosts."""

    @property
    def instances(self) -> Sequence[int]:
        """The indices of this communicator's instances in the job.

        The argument ``root`` of a method must be one of these indices.
        """

    @property
    def instance_index(self) -> int:
        """Index of this instance in ``instances``, 0 to ``num_instances`` - 1."""

    @property
    def num_instances(self) -> int:
        """Number of instances in this communicator."""

    @property
    def host_memory(self) -> HostMemory | None:
        """The memory that all instances share; None for one instance or if ``spans_hosts``."""

    @property
    def host_links(self) -> HostLinks | None:
        """The connections between hosts; None with a single host, or without shared memory."""

    def all_reduce(self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` element by element over all instances, in place.

        All instances get bit-identical results. Values of float16 and bfloat16 are accumulated in
        float32.
        """

    def reduce_scatter(
        self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = ""
    ) -> np.ndarray[Any, Any]:
        """Reduce ``array`` over all instances, and return this instance's block of the result.

        The first dimension of the result is divided into one block for each instance.

        Args:
            array: The array to reduce, which is not changed. The size of its first dimension is a
                multiple of the number of instances.
            op: The operation.
            name: A name that the user gave the call.
        """

    def add_replicas(self, leaves: np.ndarray[Any, Any]) -> None:
        """Sum the rows of ``leaves`` over all instances, and store the sum in ``leaves[0]``.

        Row r of instance i belongs to global replica i * L + r, where L is the number of local
        replicas. The rows are added in the order of one fixed binary tree over the replicas. So the
        bits of the sum do not depend on the number of instances. All rows except ``leaves[0]`` are
        undefined after the call.

        Args:
            leaves: An array of the shape [local replicas, elements], in memory made by
                ``gradient_buffer``.
        """

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed memory; arrays in this memory are reduced fastest.

        The instances of a host share this memory. All instances pass the same ``num_bytes``. The
        memory is freed once no array uses it.
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
        """Return once every instance has called ``barrier``."""

    def agree(self, signature: Signature) -> None:
        """Check that all instances pass an equal ``signature``; return once all have passed it."""

    def end_if_interrupted(self, call: str, error: BaseException) -> None:
        """Leave the group if ``error`` interrupted a collective call; later calls raise an error.

        The collective calls of this protocol call this method themselves. A function that makes
        several collective calls also calls this method, if an error comes between two of the calls.
        """

    def close(self) -> None:
        """Release memory and connections; further calls of ``close`` do nothing."""


class Meeting(Protocol):
    """A group of processes that exchange small values, such as addresses, to set up connections.

    All processes of the group must make every call. Values are JSON values: strings, numbers,
    booleans, None, and lists of them. A tuple may arrive as a list.
    """

    @property
    def rank(self) -> int:
        """Index of this instance in the group."""

    @property
    def size(self) -> int:
        """Number of instances in the group."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the ``value`` that each instance passed, in order of rank."""

    def broadcast(self, value: Any) -> Any:
        """Return the ``value`` that rank 0 passed."""

    def split(self, color: int, key: int) -> Meeting:
        """Return a Meeting of the instances that pass the same ``color``, ordered by ``key``."""
