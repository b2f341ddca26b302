"""The interfaces of collective communication: a communicator, and how its instances meet."""

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
# torch.distributed also combines the bits of integers; our own calls do not offer it.
AnyReduceOp = Literal[ReduceOp, "band", "bor", "bxor"]


class HostMemory(Protocol):
    """Memory that all instances of the job share; they are on one host.

    Its calls are collective, except ``own_slice``.
    """

    def common_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed bytes that are the same memory on all instances."""

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance reduces; the slices of all cover all."""

    def reduce_slice(self, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Write the sum over all instances to ``own_slice`` of ``array`` (reduce-scatter).

        The rest of ``array`` stays. Other instances read it until the next collective call.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """


class HostLinks(Protocol):
    """The connections between the hosts of a job whose instances share memory on each of them."""

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """Index in the job of the instances of every host."""

    def start_compressed(
        self, array: np.ndarray[Any, Any], compression: Compression, name: str = ""
    ) -> None:
        """Start to sum ``array`` over all instances, in place; collective.

        Within a host it is added as ``all_reduce`` does; ``compression`` says what hosts send one
        another. Every instance ends with bit-identical values. Nobody may touch the array before
        the call is finished.

        Args:
            array: float16 or float32, flat, in memory made by ``gradient_buffer``.
            compression: of this array; every instance has its own, of the same name.
            name: the user's name of the call, for messages.

        Raises:
            ValueError: ``array`` is not in memory made by ``gradient_buffer``.
        """

    def finish_compressed(self) -> None:
        """Return once the first array that was started and not finished holds its sum; collective.

        If the next one is started before, the links have no pause between them.
        """


class Communicator(Protocol):
    """The collectives of a set of instances. Every call is collective: all of them make it.

    Arrays are C-contiguous. ``name`` is the user's name of a call, for messages. Every call but
    ``close`` raises CollectiveMismatchError if the instances make different ones, and
    InstanceLostError if one of them ended or does not arrive in time.
    """

    background: Background
    """Runs calls beside the program; a direct call waits for those submitted before."""

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
        """Memory that all instances share; None with one instance or several hosts, or disabled."""

    @property
    def host_links(self) -> HostLinks | None:
        """What connects several hosts; None on one host, or where instances share no memory."""

    def all_reduce(self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` element by element over all instances, in place.

        Every instance ends with bit-identical values. float16 and bfloat16 are added in float32.
        """

    def reduce_scatter(
        self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = ""
    ) -> np.ndarray[Any, Any]:
        """Return this instance's block of the first dimension of the reduced ``array``.

        Args:
            array: It is not changed. Its first dimension is a multiple of the instances.
            op: The operation.
            name: The user's name of the call.
        """

    def add_replicas(self, leaves: np.ndarray[Any, Any]) -> None:
        """Write the sum of all rows of all instances to ``leaves[0]``; other rows are undefined.

        Row r of instance i belongs to global replica iL + r. The rows are added in the order of one
        fixed binary tree over the replicas, so the bits do not depend on the number of instances.

        Args:
            leaves: [local replicas L, elements], in memory made by ``gradient_buffer``.
        """

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed bytes in which arrays are reduced fastest: instances of a host share them.

        All instances pass the same size. The memory is freed when no array uses it.
        """

    def broadcast(self, array: np.ndarray[Any, Any], root: int = 0, name: str = "") -> None:
        """Overwrite ``array`` with the one of instance ``root``, in place."""

    def all_gather(self, array: np.ndarray[Any, Any], name: str = "") -> np.ndarray[Any, Any]:
        """Return the arrays of all instances, stacked: [instances, *shape]."""

    def gather(
        self, array: np.ndarray[Any, Any], root: int = 0, name: str = ""
    ) -> np.ndarray[Any, Any] | None:
        """Return what ``all_gather`` returns at instance ``root``, and None elsewhere."""

    def all_gather_object(self, value: object, name: str = "") -> list[Any]:
        """Return the picklable ``value`` of every instance, in instance order."""

    def gather_object(self, value: object, root: int = 0, name: str = "") -> list[Any] | None:
        """Return what ``all_gather_object`` returns at instance ``root``, and None elsewhere."""

    def broadcast_object(self, value: object, root: int = 0, name: str = "") -> Any:
        """Return the picklable ``value`` of instance ``root``."""

    def barrier(self) -> None:
        """Return once every instance has called this."""

    def agree(self, signature: Signature) -> None:
        """Return once every instance makes the call ``signature``."""

    def close(self) -> None:
        """Release memory and connections; calling it again does nothing."""


class Meeting(Protocol):
    """Some instances of the job that can exchange small values; every call is collective.

    A value is what JSON knows: texts, numbers, booleans, None, lists of them. A tuple may come back
    as a list.
    """

    @property
    def rank(self) -> int:
        """Index of this instance among those that meet."""

    @property
    def size(self) -> int:
        """Number of instances that meet."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every instance, in order of rank."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""

    def split(self, color: int, key: int) -> Meeting:
        """Return the meeting of those that pass the same ``color``, in order of ``key``."""
