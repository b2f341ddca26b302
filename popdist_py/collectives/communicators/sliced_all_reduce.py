"""All-reduce of large arrays in slices: reduce-scatter to their owners, then all-gather.

An instance reaches the others' data in one of three ways: the array lies in a window, or it passes
through the slots, or it is read from the other process's memory. Between hosts, the owners of one
slice (one on each host) all-reduce it.

Nothing here decides which calls agree, nor opens memory or connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.between_hosts.polled_mpi import MpiGroup
from popdist_py.collectives.tree import Adder, combine, nodes_of
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup

__all__ = ["SlicedAllReduce"]

# Above these sizes an instance reads the others' memory. The kernel looks up every page that it
# reads, so the slots are faster as long as they stay in the cache: with two instances, always.
# Between hosts the pieces of one slot are too small to keep a network link busy.
_MIN_READ_BYTES, _MIN_READ_BYTES_BETWEEN_HOSTS = 32 * CHUNK_BYTES, 2 * CHUNK_BYTES
# Hosts reduce a slice in pieces: large enough for few calls, small enough that the first starts
# early.
_CHUNKS_PER_PIECE, _PIECES_IN_FLIGHT = 2, 4


class SlicedAllReduce:
    """Reduces large arrays over the instances of this host, and of all hosts.

    Args:
        host: the instances of this host.
        hosts: index in the job of the instances of every host.
        slice_owners: the owners of this instance's slice on all hosts; None with one host, and for
            an instance that owns no slice.
        slot_bytes: size of a slot on the host that has the smallest.
        can_read: whether on every host the instances can read one another's memory.
    """

    def __init__(
        self,
        host: HostGroup,
        hosts: Sequence[Sequence[int]],
        slice_owners: MpiGroup | None,
        slot_bytes: int,
        can_read: bool,
    ) -> None:
        self._host = host
        self._hosts = hosts
        self._slice_owners = slice_owners
        self._slot_bytes = slot_bytes
        self._can_read = can_read
        self._read_above: float = float("inf") if host.size == 2 else _MIN_READ_BYTES
        if len(hosts) > 1:
            self._read_above = _MIN_READ_BYTES_BETWEEN_HOSTS
        # Allocated once: new memory costs a page fault for every 4 KiB, at its first use.
        self._scratch = np.empty((host.size, CHUNK_BYTES), np.uint8)
        # A slice has one owner on every host, so the smallest host limits the number of slices.
        self._num_owners = min(map(len, hosts))

    def all_reduce_shared(self, plan: CallPlan, views: Sequence[Array]) -> None:
        """Reduce arrays that lie in a window; ``views`` are those of all instances of the host."""
        self._reduce_own_slice(plan, views[0].size, _parts_of(views), views)
        self._host.barrier.wait_for_all(plan.signature)

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance reduces."""
        return _slice_of(self._host.position, self._num_owners, size)

    def reduce_scatter_shared(self, plan: CallPlan, views: Sequence[Array]) -> None:
        """Reduce this instance's slice of arrays that lie in a window, into its own array."""
        own = self._host.position
        views = [views[own], *views[:own], *views[own + 1 :]]
        self._reduce_own_slice(plan, views[0].size, _parts_of(views), views[:1])

    def all_reduce_private(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> None:
        """Reduce arrays outside the windows; ``addresses`` are theirs in the host's processes."""
        if self._can_read and flat.nbytes > self._read_above:
            self._all_reduce_by_reading(plan, flat, addresses)
        else:
            self._all_reduce_through_slots(plan, flat)

    def add_replicas(self, plan: CallPlan, leaves: Sequence[Array]) -> None:
        """Add the rows of all instances by the tree; ``leaves`` lie in a window."""
        columns, part_size = leaves[0].shape[1], CHUNK_BYTES // 4 // leaves[0].itemsize
        for part in self._own_parts(columns, part_size):
            total = self._tree_sum(leaves, part, plan)
            for rows in leaves:
                np.copyto(rows[0, part], total)
        self._host.barrier.wait_for_all(plan.signature)

    # --- Ways to the others' data ---------------------------------------------------------------

    def _all_reduce_by_reading(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> None:
        """Read the own slice of all others and reduce it in place, then read the other slices."""
        host = self._host
        others = [position for position in range(host.size) if position != host.position]
        buffers = {position: self._scratch[position].view(flat.dtype) for position in others}

        def sources(part: slice) -> list[Array]:
            arrays = [flat[part]]
            for position in others:
                buffer = buffers[position][: part.stop - part.start]
                address = addresses[position] + part.start * flat.itemsize
                host.read(position, address, buffer, plan)
                arrays.append(buffer)
            return arrays

        self._reduce_own_slice(plan, flat.size, sources, [flat])
        host.barrier.wait_for_all(plan.signature)
        for owner in range(self._num_owners):
            part = _slice_of(owner, self._num_owners, flat.size)
            if owner != host.position and part.start < part.stop:
                address = addresses[owner] + part.start * flat.itemsize
                host.read(owner, address, flat[part], plan)
        host.barrier.wait_for_all(plan.signature)

    def _all_reduce_through_slots(self, plan: CallPlan, flat: Array) -> None:
        """Reduce slot by slot: every owner reduces its slice of a slot, then all copy all slices.

        Only the slices that others reduce pass through the slots.
        """
        host, own = self._host, self._host.position
        slot_size = self._slot_bytes // flat.itemsize
        for start in range(0, flat.size, slot_size):
            turn = host.next_turn()
            chunk = flat[start : start + slot_size]
            slots = [slot[: chunk.size] for slot in plan.slots[turn]]
            other_slices = [
                (slots[owner], _slice_of(owner, self._num_owners, chunk.size))
                for owner in range(self._num_owners)
                if owner != own
            ]
            for _, part in other_slices:
                np.copyto(slots[own][part], chunk[part])
            host.wait_for_same_call(plan, turn)
            sources = [chunk, *slots[:own], *slots[own + 1 :]]
            self._reduce_own_slice(plan, chunk.size, _parts_of(sources), [chunk, slots[own]])
            host.barrier.wait_for_all(plan.signature)
            for slot, part in other_slices:
                np.copyto(chunk[part], slot[part])

    # --- Slices ---------------------------------------------------------------------------------

    def _own_parts(self, size: int, part_size: int) -> Iterator[slice]:
        """Yield parts of the slice that this instance reduces; none if it owns no slice."""
        position = self._host.position
        if position >= self._num_owners:
            return
        own = _slice_of(position, self._num_owners, size)
        for start in range(own.start, own.stop, max(1, part_size)):
            yield slice(start, min(start + part_size, own.stop))

    def _reduce_own_slice(
        self,
        plan: CallPlan,
        size: int,
        sources: Callable[[slice], Sequence[Array]],
        outputs: Sequence[Array],
    ) -> None:
        """Reduce this instance's slice over the instances of this host, and of all hosts.

        While pieces are reduced between the hosts, the next ones are reduced within this host.

        Args:
            plan: of the call.
            size: number of elements of the whole array.
            sources: returns, for a part of the array, that part on each instance of this host. If
                one of them is also the first output, it comes first.
            outputs: arrays of ``size`` elements that receive the result.
        """
        reduction = _reduction_of(plan)
        if self._slice_owners is None:
            for part in self._own_parts(size, reduction.chunk_size):
                reduction.reduce_chunk(sources(part), outputs[0][part])
                for output in outputs[1:]:
                    np.copyto(output[part], outputs[0][part])
            return
        in_flight: deque[Callable[[], None]] = deque()
        for part in self._own_parts(size, _CHUNKS_PER_PIECE * reduction.chunk_size):
            if len(in_flight) == _PIECES_IN_FLIGHT:
                in_flight.popleft()()
            in_flight.append(self._start_between_hosts(plan, part, sources, outputs))
        while in_flight:
            in_flight.popleft()()

    def _start_between_hosts(
        self,
        plan: CallPlan,
        part: slice,
        sources: Callable[[slice], Sequence[Array]],
        outputs: Sequence[Array],
    ) -> Callable[[], None]:
        """Start to reduce ``part`` over the hosts; return the function that completes it."""
        reduction, slice_owners = _reduction_of(plan), self._slice_owners
        assert slice_owners is not None
        # 16-bit floats are added in a float32 buffer; other dtypes directly in the first output.
        if reduction.is_half:
            total, copies = np.empty(part.stop - part.start, reduction.accumulate_dtype), outputs
        else:
            total, copies = outputs[0][part], outputs[1:]
        for start in range(0, total.size, reduction.chunk_size):
            stop = min(start + reduction.chunk_size, total.size)
            chunk = slice(part.start + start, part.start + stop)
            reduction.accumulate(sources(chunk), total[start:stop])
        request = slice_owners.start_all_reduce(total, reduction.op)

        def complete() -> None:
            slice_owners.wait(request, plan.signature)
            reduction.finalize(total)
            for output in copies:
                reduction.narrow(total, output[part])

        return complete

    def _tree_sum(self, leaves: Sequence[Array], part: slice, plan: CallPlan) -> Array:
        """Return the sum of the leaves of all replicas in ``part``.

        Args:
            leaves: those of each instance of this host.
            part: columns.
            plan: of the call.
        """
        rows = leaves[0].shape[0]
        num_replicas = rows * sum(map(len, self._hosts))
        adder = Adder(leaves[0].dtype, part.stop - part.start)
        leaf_values = {
            (0, instance * rows + row): view[row, part]
            for instance, view in zip(self._host.instances, leaves, strict=True)
            for row in range(rows)
        }
        sums = combine(leaf_values, num_replicas, adder)
        if self._slice_owners is not None:
            nodes = [
                nodes_of((i * rows + row for i in host for row in range(rows)), num_replicas)
                for host in self._hosts
            ]
            values = list(sums.values())
            sums = combine(
                self._slice_owners.all_gather_nodes(values, nodes, plan.signature),
                num_replicas,
                adder,
            )
        (total,) = sums.values()
        return total


def _reduction_of(plan: CallPlan) -> Reduction:
    assert plan.reduction is not None
    return plan.reduction


def _parts_of(arrays: Sequence[Array]) -> Callable[[slice], list[Array]]:
    return lambda part: [array[part] for array in arrays]


def _slice_of(owner: int, num_owners: int, size: int) -> slice:
    """Return the slice that one owner reduces; slices end at cache lines."""
    per_owner = -(-size // num_owners // 16) * 16
    start = min(owner * per_owner, size)
    return slice(start, min(start + per_owner, size))
