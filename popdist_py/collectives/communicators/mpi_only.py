"""The communicator over MPI alone: for groups of instances, and where memory cannot be shared.

Importing it initialises MPI, so ``popdist_py.context`` imports it when a job of several instances
starts, and never before. Nothing here shares memory or opens sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction, dtype_name
from popdist_py.collectives.background import Background
from popdist_py.collectives.between_hosts.polled_mpi import MpiGroup
from popdist_py.collectives.object_calls import ObjectCalls
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.tree import Adder, combine, nodes_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from popdist_py.collectives import ReduceOp
    from popdist_py.environment import CollectiveSettings

__all__ = ["MpiCommunicator"]


class MpiCommunicator(ObjectCalls):
    """Instances that communicate through MPI; satisfies ``popdist_py.collectives.Communicator``.

    Args:
        comm: their communicator; MPI rank = instance index, unless ``instances`` says otherwise.
        settings: the user's.
        instances: index in the job of each rank.
    """

    def __init__(
        self, comm: MPI.Comm, settings: CollectiveSettings, instances: Sequence[int] | None = None
    ) -> None:
        self.instances = range(comm.Get_size()) if instances is None else instances
        self._mpi = MpiGroup(comm, self.instances, settings.hang_timeout)
        self.background = Background()
        # It is not known which hosts the instances are on: several hosts is the safe assumption.
        self.spans_hosts = True
        self.host_memory = None
        self.host_links = None
        self.instance_index: int = comm.Get_rank()
        self.num_instances: int = comm.Get_size()

    def all_reduce(self, array: Array, op: ReduceOp = "sum", name: str = "") -> None:
        """Reduce ``array`` in place."""
        reduction = Reduction(op, array.dtype, self.num_instances)
        call = Signature("all_reduce", f"op={op}", dtype_name(array.dtype), array.shape, name)
        self.agree(call)
        flat = array.reshape(-1)
        total = reduction.widen(flat, np.empty(flat.shape, reduction.accumulate_dtype))
        self._mpi.all_reduce(total, op, call)
        reduction.finalize(total)
        if total is not flat:
            reduction.narrow(total, flat)

    def add_replicas(self, leaves: Array) -> None:
        """Add up the rows of all instances in the order of the tree over replicas."""
        call = Signature("add_replicas", "", dtype_name(leaves.dtype), leaves.shape)
        self.agree(call)
        rows = leaves.shape[0]
        num_replicas = rows * self.num_instances
        step = max(1, CHUNK_BYTES // leaves.itemsize)
        add = Adder(leaves.dtype, step)
        nodes = [
            nodes_of(range(i * rows, (i + 1) * rows), num_replicas)
            for i in range(self.num_instances)
        ]
        for start in range(0, leaves.shape[1], step):
            part = slice(start, start + step)
            add.start()
            first = self.instance_index * rows
            leaf_values = {(0, first + row): leaves[row, part] for row in range(rows)}
            own_sums = list(combine(leaf_values, num_replicas, add).values())
            all_sums = self._mpi.all_gather_nodes(own_sums, nodes, call)
            (leaves[0, part],) = combine(all_sums, num_replicas, add).values()

    def broadcast(self, array: Array, root: int = 0, name: str = "") -> None:
        """Overwrite ``array`` with the one of instance ``root``."""
        call = Signature("broadcast", f"root={root}", dtype_name(array.dtype), array.shape, name)
        self.agree(call)
        self._mpi.broadcast(array.reshape(-1).view(np.uint8), self.instances.index(root), call)

    def all_gather(self, array: Array, name: str = "") -> Array:
        """Return the arrays of all instances, stacked."""
        call = Signature("all_gather", "", dtype_name(array.dtype), array.shape, name)
        self.agree(call)
        return self._mpi.all_gather(array, call)

    def gather(self, array: Array, root: int = 0, name: str = "") -> Array | None:
        """Return the arrays of all instances, stacked; None but at instance ``root``."""
        call = Signature("gather", f"root={root}", dtype_name(array.dtype), array.shape, name)
        self.agree(call)
        return self._mpi.gather(array, self.instances.index(root), call)

    def _gather_bytes(
        self, data: Array, signature: Signature, root: int | None = None
    ) -> list[Array] | None:
        self.agree(signature)
        rank = None if root is None else self.instances.index(root)
        return self._mpi.gather_bytes(data, signature, rank)

    def _broadcast_bytes(self, data: Array, signature: Signature, root: int) -> Array:
        self.agree(signature)
        return self._mpi.broadcast_bytes(data, self.instances.index(root), signature)

    def gradient_buffer(self, num_bytes: int) -> Array:
        """Return memory of this process: instances share none here."""
        self.agree(Signature("gradient_buffer", f"num_bytes={num_bytes}"))
        return np.zeros(num_bytes, np.uint8)

    def barrier(self) -> None:
        """Return once every instance has called this."""
        self.agree(Signature("barrier"))

    def agree(self, signature: Signature) -> None:
        """Return once all instances make the call ``signature``."""
        self.background.drain()
        if not self._mpi.compare(signature.code, 0, signature)[0]:
            raise mismatch(self._mpi.descriptions(signature), self.instances)

    def close(self) -> None:
        """Wait for the background calls; MPI itself is finalised by mpi4py at exit."""
        if self._mpi.lost_error is None and not self.background.is_forked:
            self.background.drain()
