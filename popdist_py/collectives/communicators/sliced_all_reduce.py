"""All-reduce of large arrays in slices, as a reduce-scatter and an all-gather.

Each instance owns one slice of the array, which it reduces for the other instances of its host. An
owner gets the data of the other instances in one of three ways. The arrays are in a window of
shared memory, or the instances copy them to slots in shared memory, or the owner accesses the
memory of the other processes directly. Between hosts, the owners of the same slice all-reduce this
slice.

This module does not compare calls, map memory or open connections.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup
from popdist_py.collectives.within_host.host_group import Agreement, CallPlan, HostGroup
from popdist_py.collectives.within_host.reading_trial import ReadingTrial

__all__ = ["SlicedAllReduce"]

# With several hosts, an instance reads arrays above this size directly from the memory of the other
# processes. Copies through slots would divide the array into parts of a slot's size, which are too
# small to keep a network link busy. On one host, measurements choose between slots and direct reads
# for arrays of at least two slots.
_MIN_READ_BYTES_BETWEEN_HOSTS = 2 * CHUNK_BYTES
# Before an owner writes a result, it reads _READ_BYTES_OF_ALL bytes from all instances together. A
# second-level cache can hold _READ_BYTES_OF_ALL bytes. An owner reads at least _MIN_READ_BYTES from
# each instance at a time, because smaller reads would need too many system calls.
_READ_BYTES_OF_ALL, _MIN_READ_BYTES = 2 * CHUNK_BYTES, CHUNK_BYTES // 4
# A slice is reduced between the hosts in pieces. Larger pieces need fewer calls. Smaller pieces let
# the transfer of the first piece start earlier.
_CHUNKS_PER_PIECE, _PIECES_IN_FLIGHT = 2, 4
_MAX_TRIALS = 1024
_NOT_TRIED = ReadingTrial()
# If instances share cores, the times that a trial measures also contain waits for cores. A trial
# sends only half an array through the slots, so these waits are a larger share of the time. The
# slots then seem slower than they are. Direct reads are chosen only if they seem faster by this
# factor.
_LEAST_GAIN_WHEN_CORES_ARE_SHORT = 1.4
# Slices begin at multiples of this number of elements, to align them to cache lines.
_ALIGNED_ELEMENTS = 16

_Sources: TypeAlias = Callable[[slice], Iterable[Array]]


class SlicedAllReduce:
    """Reduces large arrays over the instances of this host, and then over all hosts.

    Args:
        host: The instances of this host.
        hosts: The instance indices of each host, one sequence per host.
        slice_owners: The owners of this instance's slice on all hosts; None with one host, or if
            this instance does not own a slice.
        slot_bytes: Size in bytes of a slot on the host with the smallest slots.
        can_read: Whether, on every host, each instance can read the memory of the others.
    """

    def __init__(
        self,
        host: HostGroup,
        hosts: Sequence[Sequence[int]],
        slice_owners: MeshGroup | None,
        slot_bytes: int,
        can_read: bool,
    ) -> None:
        self._host = host
        self._hosts = hosts
        self._slice_owners = slice_owners
        self._slot_bytes = slot_bytes
        self._can_read = can_read
        # The scratch memory is allocated once, because the first use of new memory costs a page
        # fault for every 4 KiB.
        self._scratch = np.empty((4, CHUNK_BYTES), np.uint8)
        # Every slice has one owner on every host. So there are as many slices as the smallest host
        # has instances.
        self._num_owners = min(map(len, hosts))
        # Maps the code of a call, which stands for its arguments, to the measured times of calls
        # with these arguments. The times decide whether later calls use slots or direct reads. All
        # instances must make the same decision, so times are added only in a call that all
        # instances make.
        self._trials: dict[int, ReadingTrial] = {}
        self._least_gain = _LEAST_GAIN_WHEN_CORES_ARE_SHORT if host.cores_are_short else 1.0

    def all_reduce_shared(self, plan: CallPlan, views: Sequence[Array]) -> None:
        """Reduce arrays in shared memory; ``views`` are the arrays of this host's instances."""
        self._reduce_own_slice(plan, _parts_of(views), views[0], _copying_to(views))
        self._host.barrier.wait_for_all(plan.signature)

    def own_slice(self, size: int) -> slice:
        """Return this instance's slice of an array with ``size`` elements."""
        return _slice_of(self._host.position, self._num_owners, size)

    def reduce_scatter_shared(self, plan: CallPlan, views: Sequence[Array]) -> None:
        """Reduce this instance's slice of ``views`` in place, in this instance's own view."""
        own = self._host.position
        views = [views[own], *views[:own], *views[own + 1 :]]
        self._reduce_own_slice(plan, _parts_of(views), views[0])

    def publish_first_slot(self, plan: CallPlan, flat: Array) -> None:
        """If slots are used for the array ``flat``, copy its first part to this instance's slot.

        All instances can then reduce the first part right after the next barrier.
        """
        if not self._is_read(plan, flat) and not self._is_tried(plan, flat):
            self._publish(plan, flat[: self._slot_size(plan)], self._host.coming_turn)

    def reduce_scatter_private(self, plan: CallPlan, blocks: Array, out: Array) -> None:
        """Reduce-scatter arrays that are outside the shared memory, on a single host.

        Args:
            plan: Plan of the call.
            blocks: This instance's array, of the shape [instances, elements]: one block for each
                instance.
            out: A flat array that receives the result.
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
        self, plan: CallPlan, flat: Array, agreement: Agreement, *, is_published: bool
    ) -> None:
        """Reduce ``flat`` in place, if arrays of some instances are outside the shared memory.

        Args:
            plan: Plan of the call.
            flat: The array of this instance.
            agreement: The locations of the arrays of all instances.
            is_published: Whether the caller has called ``publish_first_slot``.
        """
        if self._is_read(plan, flat):
            self._all_reduce_directly(plan, flat, agreement.addresses)
            return
        if self._is_tried(plan, flat):
            self._try_both(plan, flat, agreement.addresses)
            return
        if agreement.some_in_window:
            # Some arrays are in shared memory and others are not, so all arrays must pass through
            # slots. An instance copies an array in shared memory to its slot only now, because it
            # did not know earlier that slots are needed.
            if not is_published:
                self._publish(plan, flat[: self._slot_size(plan)], self._host.current_turn)
            self._host.barrier.wait_for_all(plan.signature)
        self._all_reduce_through_slots(plan, flat)

    def publish_to_reduce(self, plan: CallPlan, flat: Array) -> None:
        """If slots are used for the array ``flat``, copy its first part to this instance's slot.

        Exactly one barrier must follow before ``reduce_private`` is called.
        """
        if not self._is_read_to_reduce(flat):
            self._publish(plan, flat[: self._slot_size(plan)], self._host.coming_turn)

    def reduce_private(
        self, plan: CallPlan, flat: Array, agreement: Agreement, root: int, *, is_root: bool
    ) -> None:
        """Reduce arrays in place on the root only; call ``publish_to_reduce`` before.

        Args:
            plan: Plan of the call.
            flat: The array of this instance.
            agreement: The locations of the arrays of all instances.
            root: Position of the root on its host; unused with several hosts.
            is_root: Whether this instance is the root.
        """
        if self._is_read_to_reduce(flat):
            self._reduce_directly(plan, flat, agreement.addresses, root)
        else:
            self._all_reduce_through_slots(plan, flat, takes_result=is_root)

    def _is_read_to_reduce(self, flat: Array) -> bool:
        return len(self._hosts) == 1 and self._may_be_read(flat)

    def _may_be_read(self, flat: Array) -> bool:
        between_hosts = len(self._hosts) > 1
        limit = _MIN_READ_BYTES_BETWEEN_HOSTS if between_hosts else 2 * self._slot_bytes - 1
        return self._can_read and flat.nbytes > limit

    def _is_read(self, plan: CallPlan, flat: Array) -> bool:
        """Tell whether owners read arrays directly from the memory of the other processes."""
        if not self._may_be_read(flat):
            return False
        return len(self._hosts) > 1 or self._trials.get(plan.code, _NOT_TRIED).reading_is_faster

    def _is_tried(self, plan: CallPlan, flat: Array) -> bool:
        """Tell whether this call must measure both ways, slots and direct reads."""
        if len(self._hosts) > 1 or not self._may_be_read(flat):
            return False
        return not self._trials.get(plan.code, _NOT_TRIED).is_over

    def _try_both(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> None:
        """Reduce half of an array through the slots and half by direct reads; store both times."""
        slot_size = self._slot_size(plan)
        half = flat.size // 2 // slot_size * slot_size
        offset = half * flat.itemsize
        start = time.perf_counter_ns()
        self._publish(plan, flat[:slot_size], self._host.current_turn)
        # Exclude the next barrier from the measured time, because calls after the trial do not need
        # this barrier.
        published = time.perf_counter_ns()
        self._host.barrier.wait_for_all(plan.signature)
        start += time.perf_counter_ns() - published
        self._all_reduce_through_slots(plan, flat[:half])
        middle = time.perf_counter_ns()
        self._all_reduce_directly(plan, flat[half:], [first + offset for first in addresses])
        end = time.perf_counter_ns()
        barrier, turn = self._host.barrier, self._host.next_turn()
        # Each time per element is sent as a whole number of picoseconds plus 1, because ``compare``
        # does not publish the number 0.
        location = 1 + 1000 * (middle - start) // half
        address = 1 + 1000 * (end - middle) // (flat.size - half)
        barrier.compare(turn, plan.code, plan.signature, location, address)
        if plan.code not in self._trials and len(self._trials) >= _MAX_TRIALS:
            self._trials.clear()
        trial = self._trials.setdefault(plan.code, ReadingTrial(self._least_gain))
        trial.add(*barrier.published(turn))

    # --- Exchanging data within a host ----------------------------------------------------------

    def _all_reduce_directly(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> None:
        """Read this instance's slice of all arrays, reduce it, and write the result to all arrays.

        In every array, only the owner of a slice reads and writes the slice. So a single barrier is
        enough, after the owners have written all slices.
        """
        host, itemsize = self._host, flat.itemsize

        def write(part: slice) -> None:
            offset, size = part.start * itemsize, (part.stop - part.start) * itemsize
            for position in host.others():
                host.write_bytes(
                    position, addresses[position] + offset, addresses[host.position] + offset, size
                )

        sources = self._reading(plan, flat, addresses)
        self._reduce_own_slice(plan, sources, flat, write, self._read_bytes())
        host.barrier.wait_for_all(plan.signature)

    def _reduce_directly(
        self, plan: CallPlan, flat: Array, addresses: Sequence[int], root: int
    ) -> None:
        """Read this instance's slice of all arrays, reduce it, and write the result to the root.

        This method works on a single host only.
        """
        host, sources = self._host, self._reading(plan, flat, addresses)
        reduction, result = _reduction_of(plan), self._scratch[3].view(flat.dtype)
        part_size = min(self._read_bytes() // flat.itemsize, reduction.chunk_size)
        for part in self.own_parts(flat.size, part_size):
            if root == host.position:
                reduction.reduce_chunk(sources(part), flat[part])
                continue
            out = result[: part.stop - part.start]
            reduction.reduce_chunk(sources(part), out)
            target = addresses[root] + part.start * flat.itemsize
            host.write_bytes(root, target, out.ctypes.data, out.nbytes)
        host.barrier.wait_for_all(plan.signature)

    def _read_bytes(self) -> int:
        """Return the number of bytes to read from each other instance at a time."""
        return max(_READ_BYTES_OF_ALL // self._host.size, _MIN_READ_BYTES)

    def _reading(self, plan: CallPlan, flat: Array, addresses: Sequence[int]) -> _Sources:
        """Return a function that yields a part of each instance's array, in order of position.

        The parts of other instances are read directly from their memory.
        """
        host = self._host
        own, itemsize = host.position, flat.itemsize
        first, later, kept = (row.view(flat.dtype) for row in self._scratch[:3])
        first_address, later_address = (row.ctypes.data for row in self._scratch[:2])

        def sources(part: slice) -> Iterator[Array]:
            count, offset = part.stop - part.start, part.start * itemsize
            values = flat[part]
            # The result overwrites ``flat`` as soon as the first two sources are added. If ``flat``
            # is a later source, its values must therefore be copied first.
            if own > 1:
                kept[:count] = values
                values = kept[:count]
            for position, address in enumerate(addresses):
                if position == own:
                    yield values
                    continue
                buffer, target = (later, later_address) if position else (first, first_address)
                host.read_bytes(position, address + offset, target, count * itemsize, plan)
                yield buffer[:count]

        return sources

    def _all_reduce_through_slots(
        self, plan: CallPlan, flat: Array, *, takes_result: bool = True
    ) -> None:
        """Reduce an array in parts that fit into a slot; the caller has copied the first part.

        Each part of the array is divided into slices, and each slice has one instance as its owner.
        Every owner reduces its slice, and then all instances copy the results of all slices. Each
        instance copies its next part to its other slot before it reduces the current part. So one
        barrier for each part is enough. The results are in separate shared memory, because an
        instance may still read results while another instance already writes to its slot.
        """
        host, own = self._host, self._host.position
        turn, slot_size = host.current_turn, self._slot_size(plan)
        for start in range(0, flat.size, slot_size):
            chunk = flat[start : start + slot_size]
            following = flat[start + slot_size : start + 2 * slot_size]
            if following.size:
                self._publish(plan, following, host.next_turn())
            sources, results = plan.slots[turn].copy(), plan.results[turn]
            sources[own] = chunk
            self._reduce_own_slice(plan, _parts_of(sources), results[: chunk.size])
            host.barrier.wait_for_all(plan.signature)
            if takes_result:
                chunk[...] = results[: chunk.size]
            turn = host.current_turn

    def _publish(self, plan: CallPlan, chunk: Array, turn: int) -> None:
        """Copy ``chunk`` into this instance's slot, except the slice that this instance owns."""
        slot, own = plan.slots[turn][self._host.position], self.own_slice(chunk.size)
        for part in (slice(0, own.start), slice(own.stop, chunk.size)):
            if part.start != part.stop:
                slot[part] = chunk[part]

    def _slot_size(self, plan: CallPlan) -> int:
        """Return the number of array elements that fit in a slot."""
        return self._slot_bytes // _reduction_of(plan).dtype.itemsize

    # --- Slices ---------------------------------------------------------------------------------

    def own_parts(self, size: int, part_size: int) -> Iterator[slice]:
        """Yield the parts of this instance's slice, if this instance owns a slice."""
        position = self._host.position
        if position >= self._num_owners:
            return
        own = _slice_of(position, self._num_owners, size)
        for start in range(own.start, own.stop, max(1, part_size)):
            yield slice(start, min(start + part_size, own.stop))

    def _reduce_own_slice(
        self,
        plan: CallPlan,
        sources: _Sources,
        out: Array,
        pass_on: Callable[[slice], None] | None = None,
        part_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Reduce this instance's slice over the instances of this host, and then over all hosts.

        While some pieces are reduced between the hosts, the next pieces are reduced within this
        host.

        Args:
            plan: Plan of the call.
            sources: A function that takes a slice and returns this part of the array of each
                instance of this host. Only the first or the second array that ``sources`` returns
                may be in ``out``.
            out: An array for the result, as large as the whole array.
            pass_on: A function that copies a finished part of ``out`` to the other instances.
            part_bytes: Number of bytes to reduce at a time, at most ``CHUNK_BYTES``.
        """
        reduction = _reduction_of(plan)
        part_size = min(part_bytes // out.itemsize, reduction.chunk_size)
        if self._slice_owners is None:
            for part in self.own_parts(out.size, part_size):
                reduction.reduce_chunk(sources(part), out[part])
                if pass_on is not None:
                    pass_on(part)
            return
        in_flight: deque[Callable[[], None]] = deque()
        for part in self.own_parts(out.size, _CHUNKS_PER_PIECE * reduction.chunk_size):
            if len(in_flight) == _PIECES_IN_FLIGHT:
                in_flight.popleft()()
            in_flight.append(
                self._start_between_hosts(plan, part, sources, out, pass_on, part_size)
            )
        while in_flight:
            in_flight.popleft()()

    def _start_between_hosts(
        self,
        plan: CallPlan,
        piece: slice,
        sources: _Sources,
        out: Array,
        pass_on: Callable[[slice], None] | None,
        part_size: int,
    ) -> Callable[[], None]:
        """Start to reduce ``piece`` over the hosts; return the function that completes it."""
        reduction, slice_owners = _reduction_of(plan), self._slice_owners
        assert slice_owners is not None
        # 16-bit floats are added up in a float32 buffer. Other dtypes are added up in ``out``.
        total = out[piece]
        if reduction.is_half:
            total = np.empty(total.size, reduction.accumulate_dtype)
        for start in range(0, total.size, part_size):
            stop = min(start + part_size, total.size)
            part = slice(piece.start + start, piece.start + stop)
            reduction.accumulate(sources(part), total[start:stop])
        request = slice_owners.start_all_reduce(total, reduction.op)

        def complete() -> None:
            slice_owners.wait(request, plan.signature)
            reduction.finalize(total)
            if reduction.is_half:
                reduction.narrow(total, out[piece])
            if pass_on is not None:
                pass_on(piece)

        return complete


def _reduction_of(plan: CallPlan) -> Reduction:
    assert plan.reduction is not None
    return plan.reduction


def _parts_of(arrays: Sequence[Array]) -> _Sources:
    return lambda part: [array[part] for array in arrays]


def _copying_to(views: Sequence[Array]) -> Callable[[slice], None]:
    """Return a function that copies a part of the first array to all other arrays."""

    def copy(part: slice) -> None:
        for view in views[1:]:
            np.copyto(view[part], views[0][part])

    return copy


def _slice_of(owner: int, num_owners: int, size: int) -> slice:
    """Return the slice that belongs to ``owner``. Slices are aligned to cache lines."""
    per_owner = -(-size // num_owners // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    start = min(owner * per_owner, size)
    return slice(start, min(start + per_owner, size))
