"""All-reduce of large arrays in slices: reduce-scatter to their owners, then all-gather.

An instance reaches the others' data in one of three ways: the array lies in a window, or it passes
through the slots, or it is read from the other process's memory. Between hosts, the owners of one
slice (one on each host) all-reduce it.

Nothing here decides which calls agree, nor opens memory or connections.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.between_hosts.polled_mpi import MpiGroup
from popdist_py.collectives.tree import Adder, combine, nodes_of
from popdist_py.collectives.within_host.host_group import Agreement, CallPlan, HostGroup
from popdist_py.collectives.within_host.reading_trial import ReadingTrial

__all__ = ["SlicedAllReduce"]

# Above these sizes an instance may read the others' memory. The kernel looks up every page that it
# reads, so on one host the slots are faster for smaller arrays, and may be for larger ones. Between
# hosts the pieces of one slot are too small to keep a network link busy.
_MIN_READ_BYTES, _MIN_READ_BYTES_BETWEEN_HOSTS = 32 * CHUNK_BYTES, 2 * CHUNK_BYTES
# Hosts reduce a slice in pieces: large enough for few calls, small enough that the first starts
# early.
_CHUNKS_PER_PIECE, _PIECES_IN_FLIGHT = 2, 4
_MAX_TRIALS = 1024
_NOT_TRIED = ReadingTrial()
# Slices begin at cache lines.
_ALIGNED_ELEMENTS = 16


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
        # Allocated once: new memory costs a page fault for every 4 KiB, at its first use.
        self._scratch = np.empty((host.size, CHUNK_BYTES), np.uint8)
        # A slice has one owner on every host, so the smallest host limits the number of slices.
        self._num_owners = min(map(len, hosts))
        # By the code of the call. What is here decides how the next call is made, so it changes
        # only in a call that all instances make.
        self._trials: dict[int, ReadingTrial] = {}

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

    def lend_first(self, plan: CallPlan, flat: Array) -> None:
        """Show the others the first slot of a private array, if it is to pass through the slots.

        The next meeting then is the only one before the first reduction.
        """
        if not self._is_read(plan, flat) and not self._is_tried(plan, flat):
            self._lend(plan, flat[: self._slot_size(plan)], self._host.coming_turn)

    def reduce_scatter_private(self, plan: CallPlan, blocks: Array, out: Array) -> None:
        """Reduce this instance's block of arrays outside the windows; one host only.

        Args:
            plan: of the call.
            blocks: [instances, elements]: this instance's values for each of them.
            out: [elements], which receives the result.
        """
        host, own = self._host, self._host.position
        region = self._slot_size(plan) // host.size
        for start in range(0, max(1, out.size), region):
            part = slice(start, min(start + region, out.size))
            turn = host.next_turn()
            slots = plan.slots[turn]
            for position, values in enumerate(blocks[:, part]):
                if position != own:
                    np.copyto(slots[own][position * region :][: values.size], values)
            host.wait_for_same_call(plan, turn)
            sources = [slot[own * region :][: part.stop - part.start] for slot in slots]
            sources[own] = blocks[own, part]
            _reduction_of(plan)(sources, out[part])

    def all_reduce_private(
        self, plan: CallPlan, flat: Array, agreement: Agreement, *, is_lent: bool
    ) -> None:
        """Reduce arrays of which some lie outside the windows.

        Args:
            plan: of the call.
            flat: the array of this instance.
            agreement: of the meeting in which the instances compared the call.
            is_lent: whether ``lend_first`` was called before it.
        """
        if self._is_read(plan, flat):
            self._all_reduce_by_reading(plan, flat, agreement.addresses)
            return
        if self._is_tried(plan, flat):
            self._try_both(plan, flat, agreement.addresses)
            return
        if agreement.some_in_window:
            # An array in a window was lent by nobody: it might have been reduced there.
            if not is_lent:
                self._lend(plan, flat[: self._slot_size(plan)], self._host.current_turn)
            self._host.barrier.wait_for_all(plan.signature)
        self._all_reduce_through_slots(plan, flat)

    def _may_be_read(self, flat: Array) -> bool:
        on_one_host = len(self._hosts) == 1
        limit = _MIN_READ_BYTES if on_one_host else _MIN_READ_BYTES_BETWEEN_HOSTS
        return self._can_read and flat.nbytes > limit

    def _is_read(self, plan: CallPlan, flat: Array) -> bool:
        """Tell whether a private array is read from where it lies in the other process."""
        if not self._may_be_read(flat):
            return False
        return len(self._hosts) > 1 or self._trials.get(plan.code, _NOT_TRIED).reading_is_faster

    def _is_tried(self, plan: CallPlan, flat: Array) -> bool:
        """Tell whether it is still to be found out which way is faster for a private array."""
        if len(self._hosts) > 1 or not self._may_be_read(flat):
            return False
        return not self._trials.get(plan.code, _NOT_TRIED).is_over

    def _try_both(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> None:
        """Pass the first half of an array through the slots, read the rest, and tell the times."""
        slot_size = self._slot_size(plan)
        half = flat.size // 2 // slot_size * slot_size
        offset = half * flat.itemsize
        start = time.perf_counter_ns()
        self._lend(plan, flat[:slot_size], self._host.current_turn)
        self._host.barrier.wait_for_all(plan.signature)
        self._all_reduce_through_slots(plan, flat[:half])
        middle = time.perf_counter_ns()
        self._all_reduce_by_reading(plan, flat[half:], [first + offset for first in addresses])
        end = time.perf_counter_ns()
        barrier, turn = self._host.barrier, self._host.next_turn()
        # Picoseconds for an element, as whole numbers, of which none may be 0.
        location = 1 + 1000 * (middle - start) // half
        address = 1 + 1000 * (end - middle) // (flat.size - half)
        barrier.compare(turn, plan.code, plan.signature, location, address)
        if plan.code not in self._trials and len(self._trials) >= _MAX_TRIALS:
            self._trials.clear()
        self._trials.setdefault(plan.code, ReadingTrial()).add(*barrier.published(turn))

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
        buffers = [row.view(flat.dtype) for row in self._scratch]

        def sources(part: slice) -> list[Array]:
            arrays = [buffer[: part.stop - part.start] for buffer in buffers]
            for position, array in enumerate(arrays):
                if position != host.position:
                    address = addresses[position] + part.start * flat.itemsize
                    host.read(position, address, array, plan)
            # The result goes to where the own values lie: only the first two are read before that.
            if host.position < 2:
                arrays[host.position] = flat[part]
            else:
                arrays[host.position][...] = flat[part]
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

        The first slot was lent before the last meeting. While one slot is reduced, the next is
        already lent, so that the instances meet once for each slot. The results lie apart from what
        is lent: one instance may still read them where another already lends.
        """
        host, own = self._host, self._host.position
        turn, slot_size = host.current_turn, self._slot_size(plan)
        for start in range(0, flat.size, slot_size):
            chunk = flat[start : start + slot_size]
            following = flat[start + slot_size : start + 2 * slot_size]
            if following.size:
                self._lend(plan, following, host.next_turn())
            sources, results = plan.slots[turn].copy(), plan.results[turn]
            sources[own] = chunk
            self._reduce_own_slice(plan, chunk.size, _parts_of(sources), [results])
            host.barrier.wait_for_all(plan.signature)
            chunk[...] = results[: chunk.size]
            turn = host.current_turn

    def _lend(self, plan: CallPlan, chunk: Array, turn: int) -> None:
        """Copy into the own slot what others reduce: all but the own slice."""
        slot, own = plan.slots[turn][self._host.position], self.own_slice(chunk.size)
        for part in (slice(0, own.start), slice(own.stop, chunk.size)):
            if part.start != part.stop:
                slot[part] = chunk[part]

    def _slot_size(self, plan: CallPlan) -> int:
        """Return how many elements pass through the slots at a time."""
        return self._slot_bytes // _reduction_of(plan).dtype.itemsize

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
                one of them is also the first output, it is the first or the second.
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
    per_owner = -(-size // num_owners // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    start = min(owner * per_owner, size)
    return slice(start, min(start + per_owner, size))
