"""Reduction in the order of the fixed tree, which does not depend on the hosts of the instances.

The other algorithms reduce the arrays of each host first. Their sums of floats therefore change by
rounding if the same instances are distributed over other hosts.

This module does not compare calls, map memory or open connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup
from popdist_py.collectives.tree import Combiner, combine, nodes_of
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup

__all__ = ["TreeReduction"]


class TreeReduction:
    """Reduces arrays over all instances in the order of ``popdist_py.collectives.tree``.

    Args:
        host: The instances of this host.
        hosts: The instance indices of each host, one sequence per host.
        slice_owners: The owners of this instance's slice on all hosts; None with one host, or if
            this instance does not own a slice.
        own_parts: A function that yields the parts of this instance's slice; its arguments are the
            size of the whole array and the largest size of a part.
    """

    def __init__(
        self,
        host: HostGroup,
        hosts: Sequence[Sequence[int]],
        slice_owners: MeshGroup | None,
        own_parts: Callable[[int, int], Iterator[slice]],
    ) -> None:
        self._host = host
        self._hosts = hosts
        self._slice_owners = slice_owners
        self._own_parts = own_parts

    def all_reduce(self, plan: CallPlan, flat: Array, agree: Callable[[CallPlan], object]) -> None:
        """Reduce ``flat`` in place, through the slots of the instances.

        Args:
            plan: Plan of the call.
            flat: The array of this instance.
            agree: A function that waits for all instances and compares their calls.
        """
        host, reduction = self._host, plan.reduction
        assert reduction is not None
        dtype = reduction.accumulate_dtype
        size = min(slot.nbytes for slot in plan.slots[0]) // dtype.itemsize
        for start in range(0, max(1, flat.size), size):
            chunk = flat[start : start + size]
            slots = [slot.view(dtype)[: chunk.size] for slot in plan.slots[host.coming_turn]]
            own = slots[host.position]
            own[...] = reduction.widen(chunk, own)
            if start == 0:
                agree(plan)
            else:
                host.next_turn()
                host.barrier.wait_for_all(plan.signature)
            self.reduce_rows(plan, [slot[None] for slot in slots])
            reduction.finalize(own)
            reduction.narrow(own, chunk)

    def reduce_rows(self, plan: CallPlan, leaves: Sequence[Array]) -> None:
        """Reduce the rows of all instances; store the result in the first row of each array.

        Args:
            plan: Plan of the call; without a reduction, the rows are added.
            leaves: For each instance of this host, an array in shared memory with a row for each
                leaf of the tree.
        """
        columns, part_size = leaves[0].shape[1], CHUNK_BYTES // 4 // leaves[0].itemsize
        for part in self._own_parts(columns, part_size):
            total = self._result(plan, leaves, part)
            for rows in leaves:
                np.copyto(rows[0, part], total)
        self._host.barrier.wait_for_all(plan.signature)

    def _result(self, plan: CallPlan, leaves: Sequence[Array], part: slice) -> Array:
        """Return the result for the columns ``part``. The arguments are those of reduce_rows."""
        rows = leaves[0].shape[0]
        num_leaves = rows * sum(map(len, self._hosts))
        function = np.add if plan.reduction is None else plan.reduction.function
        combiner = Combiner(leaves[0].dtype, part.stop - part.start, function)
        values = {
            (0, instance * rows + row): view[row, part]
            for instance, view in zip(self._host.instances, leaves, strict=True)
            for row in range(rows)
        }
        results = combine(values, num_leaves, combiner)
        if self._slice_owners is not None:
            nodes = [
                nodes_of((i * rows + row for i in host for row in range(rows)), num_leaves)
                for host in self._hosts
            ]
            results = combine(
                self._slice_owners.all_gather_nodes(list(results.values()), nodes, plan.signature),
                num_leaves,
                combiner,
            )
        (total,) = results.values()
        return total
