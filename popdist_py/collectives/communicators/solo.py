"""The communicator of a job with one instance, where every collective returns its input.

This module does not communicate. NumPy is imported only in calls that need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from popdist_py.collectives.background import Background

if TYPE_CHECKING:
    import numpy as np

    from popdist_py.collectives import ReduceOp
    from popdist_py.collectives.signature import Signature

__all__ = ["SoloCommunicator"]


class SoloCommunicator:
    """The communicator of a single instance; satisfies ``popdist_py.collectives.Communicator``.

    Args:
        instances: A sequence with the index of the instance in the job.
    """

    instance_index = 0
    num_instances = 1
    spans_hosts = False
    host_memory = None
    host_links = None

    def __init__(self, instances: Sequence[int] = (0,)) -> None:
        self.instances = instances
        self.background = Background(is_alone=True)

    def all_reduce(self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = "") -> None:
        """Leave ``array`` unchanged, because the reduction over one instance is the array itself.

        Raises:
            TypeError: The operation is not defined for the dtype.
        """
        from popdist_py.collectives.arithmetic import Reduction

        self.background.drain()
        Reduction(op, array.dtype, 1)

    def reduce_scatter(
        self, array: np.ndarray[Any, Any], op: ReduceOp = "sum", name: str = ""
    ) -> np.ndarray[Any, Any]:
        """Return a copy of ``array``. This method raises the same errors as ``all_reduce``."""
        self.all_reduce(array, op, name)
        return array.copy()

    def add_replicas(self, leaves: np.ndarray[Any, Any]) -> None:
        """Sum the rows in the order of the tree over replicas; store the sum in ``leaves[0]``."""
        from popdist_py.collectives.arithmetic import CHUNK_BYTES
        from popdist_py.collectives.tree import Combiner, combine

        step = max(1, CHUNK_BYTES // 4 // leaves.itemsize)
        combiner = Combiner(leaves.dtype, step)
        for start in range(0, leaves.shape[1], step):
            part = slice(start, start + step)
            combiner.start()
            leaf_values = {(0, row): values for row, values in enumerate(leaves[:, part])}
            (leaves[0, part],) = combine(leaf_values, len(leaves), combiner).values()

    def gradient_buffer(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return zeroed memory of this process."""
        import numpy as np

        return np.zeros(num_bytes, np.uint8)

    def broadcast(self, array: np.ndarray[Any, Any], root: int = 0, name: str = "") -> None:
        """Leave ``array`` unchanged."""

    def all_gather(self, array: np.ndarray[Any, Any], name: str = "") -> np.ndarray[Any, Any]:
        """Return ``array`` with a leading dimension of 1."""
        return array[None].copy()

    def gather(
        self, array: np.ndarray[Any, Any], root: int = 0, name: str = ""
    ) -> np.ndarray[Any, Any] | None:
        """Return ``array`` with a leading dimension of 1."""
        return array[None].copy()

    def all_gather_object(self, value: object, name: str = "") -> list[Any]:
        """Return ``[value]``."""
        return [value]

    def gather_object(self, value: object, root: int = 0, name: str = "") -> list[Any] | None:
        """Return ``[value]``."""
        return [value]

    def broadcast_object(self, value: object, root: int = 0, name: str = "") -> Any:
        """Return ``value``."""
        return value

    def barrier(self) -> None:
        """Return at once."""

    def agree(self, signature: Signature) -> None:
        """Return at once, because this communicator has a single instance."""

    def end_if_interrupted(self, call: str, error: BaseException) -> None:
        """Do nothing, because no other instance waits for the rest of the call."""

    def close(self) -> None:
        """Wait for the background calls, and end their thread."""
        self.background.drain()
        self.background.end()
