"""Reducing large arrays: each owner reduces its slice, then everybody has the slices of all.

Three ways to the others' data: it lives in the window; it passes through the slots; it is read out
of their memory. Between hosts the owners of one slice add theirs up ("lane").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.between_hosts.polled_mpi import Link
from popdist_py.collectives.tree import Adder, combine, nodes_of
from popdist_py.collectives.within_host.host_group import Host, Plan

__all__ = ["Exchange"]

# The kernel looks up every page that it reads, so passing through the slots is faster where they
# stay in the cache: for two instances always. Between hosts a slot cannot keep a link busy.
_READ_BYTES_OF_MANY, _READ_BYTES_BETWEEN_HOSTS = 32 * CHUNK_BYTES, 2 * CHUNK_BYTES
# What travels between hosts at once: large enough for few calls, small enough to begin soon.
_CHUNKS_OF_A_PIECE, _PIECES_UNDER_WAY = 2, 4


class Exchange:
    """Reduces large arrays over the instances of this host, and of all hosts.

    Args:
        host: this one.
        hosts: index in the job of the instances of every host.
        lane: the owners of this instance's slice on all hosts; None with one host, and for an
            instance that owns no slice.
        slot_bytes: size of a slot on the host that has the smallest.
        can_read: whether on every host the instances can read one another's memory.
    """

    def __init__(
        self,
        host: Host,
        hosts: Sequence[Sequence[int]],
        lane: Link | None,
        slot_bytes: int,
        can_read: bool,
    ) -> None:
        self._host = host
        self._hosts = hosts
        self._lane = lane
        self._slot_bytes = slot_bytes
        self._can_read = can_read
        self._read_above: float = float("inf") if host.size == 2 else _READ_BYTES_OF_MANY
        if len(hosts) > 1:
            self._read_above = _READ_BYTES_BETWEEN_HOSTS
        # Made once: fresh memory costs a page fault for every 4 KiB. Pages come with the first use.
        self._scratch = np.empty((host.size, CHUNK_BYTES), np.uint8)
        # A slice has one owner on every host, so the smallest host says how many there are.
        self._num_owners = min(map(len, hosts))

    def in_place(self, plan: Plan, views: Sequence[Array]) -> None:
        """Reduce arrays that live in the window, given those of all instances of the host."""
        self._reduce_own_slice(plan, views[0].size, _parts_of(views), views)
        self._host.rendezvous.wait_for_all(plan.signature)

    def own_slice(self, size: int) -> slice:
        """Return which of ``size`` elements this instance reduces."""
        return _slice_of(self._host.position, self._num_owners, size)

    def only_own_slice(self, plan: Plan, views: Sequence[Array]) -> None:
        """Reduce this instance's slice of arrays that live in the window, for itself alone."""
        me = self._host.position
        views = [views[me], *views[:me], *views[me + 1 :]]
        self._reduce_own_slice(plan, views[0].size, _parts_of(views), views[:1])

    def outside(self, plan: Plan, flat: Array, addresses: Sequence[int]) -> None:
        """Reduce arrays that lie anywhere, given where."""
        if self._can_read and flat.nbytes > self._read_above:
            self._by_reading(plan, flat, addresses)
        else:
            self._by_slices(plan, flat)

    def add_replicas(self, plan: Plan, leaves: Sequence[Array]) -> None:
        """Add up the rows of all instances by the tree; they live in the window."""
        columns, step = leaves[0].shape[1], CHUNK_BYTES // 4 // leaves[0].itemsize
        for part in self._own_slice(columns, step):
            total = self._tree_sum(leaves, part, plan)
            for rows in leaves:
                np.copyto(rows[0, part], total)
        self._host.rendezvous.wait_for_all(plan.signature)

    # --- Ways to the others' data ---------------------------------------------------------------

    def _by_reading(self, plan: Plan, flat: Array, addresses: Sequence[int]) -> None:
        """Read the others' parts of the own slice, reduce it in place, read the other slices."""
        host = self._host
        others = [position for position in range(host.size) if position != host.position]
        rows = {position: self._scratch[position].view(flat.dtype) for position in others}

        def sources(part: slice) -> list[Array]:
            found = [flat[part]]
            for position in others:
                row = rows[position][: part.stop - part.start]
                address = addresses[position] + part.start * flat.itemsize
                host.read(position, address, row, plan)
                found.append(row)
            return found

        self._reduce_own_slice(plan, flat.size, sources, [flat])
        host.rendezvous.wait_for_all(plan.signature)
        for owner in range(self._num_owners):
            part = _slice_of(owner, self._num_owners, flat.size)
            if owner != host.position and part.start < part.stop:
                address = addresses[owner] + part.start * flat.itemsize
                host.read(owner, address, flat[part], plan)
        host.rendezvous.wait_for_all(plan.signature)

    def _by_slices(self, plan: Plan, flat: Array) -> None:
        """Of each chunk every owner reduces its slice, and all copy the slices of all owners.

        Only what others need passes through the slots.
        """
        host, me = self._host, self._host.position
        step = self._slot_bytes // flat.itemsize
        for start in range(0, flat.size, step):
            turn = host.next_turn()
            chunk = flat[start : start + step]
            slots = [slot[: chunk.size] for slot in plan.slots[turn]]
            foreign = [
                (slots[owner], _slice_of(owner, self._num_owners, chunk.size))
                for owner in range(self._num_owners)
                if owner != me
            ]
            for _, part in foreign:
                np.copyto(slots[me][part], chunk[part])
            host.meet(plan, turn)
            sources = [chunk, *slots[:me], *slots[me + 1 :]]
            self._reduce_own_slice(plan, chunk.size, _parts_of(sources), [chunk, slots[me]])
            host.rendezvous.wait_for_all(plan.signature)
            for slot, part in foreign:
                np.copyto(chunk[part], slot[part])

    # --- Slices ---------------------------------------------------------------------------------

    def _own_slice(self, size: int, step: int) -> Iterator[slice]:
        """Yield the chunks of the slice that this instance reduces; none if it owns no slice."""
        position = self._host.position
        if position >= self._num_owners:
            return
        own = _slice_of(position, self._num_owners, size)
        for start in range(own.start, own.stop, max(1, step)):
            yield slice(start, min(start + step, own.stop))

    def _reduce_own_slice(
        self,
        plan: Plan,
        size: int,
        sources: Callable[[slice], Sequence[Array]],
        outputs: Sequence[Array],
    ) -> None:
        """Reduce this instance's slice over the instances of this host, and of all hosts.

        While pieces travel between hosts, the next ones are reduced within this one.

        Args:
            plan: of the call.
            size: number of elements of the whole array.
            sources: returns what lies in a chunk of it on each instance of this host. If it is
                also the first output, it comes first.
            outputs: arrays of ``size`` that get the result.
        """
        reduction = _reduction_of(plan)
        if self._lane is None:
            for part in self._own_slice(size, reduction.chunk):
                reduction.chunked(sources(part), outputs[0][part])
                for output in outputs[1:]:
                    np.copyto(output[part], outputs[0][part])
            return
        pending: deque[Callable[[], None]] = deque()
        for part in self._own_slice(size, _CHUNKS_OF_A_PIECE * reduction.chunk):
            if len(pending) == _PIECES_UNDER_WAY:
                pending.popleft()()
            pending.append(self._start_between_hosts(plan, part, sources, outputs))
        while pending:
            pending.popleft()()

    def _start_between_hosts(
        self,
        plan: Plan,
        part: slice,
        sources: Callable[[slice], Sequence[Array]],
        outputs: Sequence[Array],
    ) -> Callable[[], None]:
        """Begin to reduce ``part`` over the hosts; what is returned ends it."""
        reduction, lane = _reduction_of(plan), self._lane
        assert lane is not None
        # Halves are added up elsewhere, in float32; all else where the result belongs.
        if reduction.is_half:
            total, copies = np.empty(part.stop - part.start, reduction.wide), outputs
        else:
            total, copies = outputs[0][part], outputs[1:]
        for start in range(0, total.size, reduction.chunk):
            stop = min(start + reduction.chunk, total.size)
            at = slice(part.start + start, part.start + stop)
            reduction.partial(sources(at), total[start:stop])
        request = lane.start_all_reduce(total, reduction.op)

        def end() -> None:
            lane.finish(request, plan.signature)
            reduction.finish(total)
            for output in copies:
                reduction.narrow(total, output[part])

        return end

    def _tree_sum(self, parts: Sequence[Array], part: slice, plan: Plan) -> Array:
        """Add up the leaves of all replicas in ``part``."""
        rows = parts[0].shape[0]
        leaves = rows * sum(map(len, self._hosts))
        adder = Adder(parts[0].dtype, part.stop - part.start)
        held = {
            (0, instance * rows + row): view[row, part]
            for instance, view in zip(self._host.instances, parts, strict=True)
            for row in range(rows)
        }
        found = combine(held, leaves, adder)
        if self._lane is not None:
            nodes = [
                nodes_of((i * rows + row for i in host for row in range(rows)), leaves)
                for host in self._hosts
            ]
            values = list(found.values())
            found = combine(
                self._lane.all_gather_nodes(values, nodes, plan.signature), leaves, adder
            )
        (total,) = found.values()
        return total


def _reduction_of(plan: Plan) -> Reduction:
    assert plan.reduction is not None
    return plan.reduction


def _parts_of(arrays: Sequence[Array]) -> Callable[[slice], list[Array]]:
    return lambda part: [array[part] for array in arrays]


def _slice_of(owner: int, num_owners: int, size: int) -> slice:
    """Return the slice that one owner reduces; slices end at cache lines."""
    per_owner = -(-size // num_owners // 16) * 16
    start = min(owner * per_owner, size)
    return slice(start, min(start + per_owner, size))
