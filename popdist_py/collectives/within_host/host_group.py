"""The instances of one host: their shared window, their barrier, and moving bytes through it.

Nothing here knows other hosts, and nothing here reduces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from popdist_py.collectives import size_thresholds
from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.collectives.within_host.host_barrier import HostBarrier, Peer
from popdist_py.collectives.within_host.peer_memory import PeerMemory
from popdist_py.collectives.within_host.shared_window import Window
from popdist_py.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from popdist_py.collectives.interfaces import Meeting

__all__ = ["Agreement", "CallPlan", "HostGroup", "exposed", "make_window"]

# Size of the slot through which an instance passes data to the others. The window has two for each
# instance, used in alternation. Where instances share cores, barriers are slow, and larger slots
# need fewer of them.
_SLOT_BYTES, _SLOT_BYTES_WHEN_CORES_ARE_SHORT = 512 * 1024, 1024 * 1024
# What is only moved takes two copies through the slots, of which one is in the cache. One copy from
# process to process is faster above a size that grows with the number of instances that share the
# memory's speed. For each call, the bytes of one instance by number of instances.
_DIRECT_BROADCAST = {2: 256 * 1024, 3: 1024 * 1024, 4: 1024 * 1024}
_DIRECT_GATHER = {2: 128 * 1024, 3: 256 * 1024, 4: 256 * 1024}
# With more instances a broadcast does so only where they share cores, and wait for one another at
# every slot.
_DIRECT_BROADCAST_WHEN_CORES_ARE_SHORT = 8 * 1024 * 1024
_NEVER = 1 << 62
# Up to this size a one-shot all-reduce is faster with two instances.
_ONE_SHOT_BYTES_OF_TWO = CHUNK_BYTES


@dataclass(slots=True)
class CallPlan:
    """The values that all calls with one signature have in common.

    Attributes:
        signature: of the call.
        code: of the signature.
        reduction: how elements are combined; None for calls that only move them.
        slots: for each turn, the slots of all instances of the host as arrays of the dtype.
        results: for each turn, the array of a slot's size that all instances write and read.
        one_shot: for each turn, what this instance reduces of these slots after a single barrier;
            None where an array takes more than that.

    A plan holds nothing that calls have shown: instances may forget it at different times.
    """

    signature: Signature
    code: int
    reduction: Reduction | None = None
    slots: tuple[list[Array], list[Array]] = ((), ())  # type: ignore[assignment]
    results: tuple[Array, ...] = ()
    one_shot: tuple[list[Array], list[Array]] | None = None


class Agreement(NamedTuple):
    """What a meeting has told about the arrays of a call.

    Attributes:
        all_in_window: whether on every host of the job they lie at one location in a window.
        some_in_window: whether one of this host lies in a window.
        all_movable: whether those of this host may all be moved to one.
        addresses: of the arrays in the processes of this host.
    """

    all_in_window: bool
    some_in_window: bool
    all_movable: bool
    addresses: Sequence[int]


# The arrays into which another instance may write.
# By a key of each exposure: several groups may be in calls, in several threads.
_exposed_arrays: dict[object, Array] = {}


@contextmanager
def exposed(array: Array) -> Iterator[None]:
    """Keep ``array`` while other instances may write into it.

    That of a call that failed is kept for good, even after the job: an instance that is late may
    still write there, and must not meet other values. After a mismatch nobody writes.
    """
    key = object()
    _exposed_arrays[key] = array
    try:
        yield
    except CollectiveMismatchError:
        del _exposed_arrays[key]
        raise
    del _exposed_arrays[key]


def make_window(local: Meeting) -> Window:
    """Return the window of the instances of one host; collective.

    Raises:
        WindowError: memory cannot be shared on this host.
    """
    size = local.size
    cores_are_short = size > _count_cores(local)
    slot_bytes = _SLOT_BYTES_WHEN_CORES_ARE_SHORT if cores_are_short else _SLOT_BYTES
    return Window(local, 2 * slot_bytes, 2 * slot_bytes + HostBarrier.size(size))


def _count_cores(local: Meeting) -> int:
    """Return the number of cores that the instances of this host may use together."""
    return len(set[int]().union(*local.all_gather(sorted(os.sched_getaffinity(0)))))


class HostGroup:
    """The instances of this host; the constructor is collective.

    Args:
        local: the instances of this host, in order.
        window: their memory, from ``make_window``.
        instance: index of this instance in the job.
        limits: Limits of the waits, and the names of the instances in messages.
    """

    def __init__(self, local: Meeting, window: Window, instance: int, limits: WaitLimits) -> None:
        self.local = local
        self.names = limits.names
        self.position = local.rank
        self.size = local.size
        self._memory = PeerMemory()
        processes = local.all_gather((instance, os.getpid(), self._memory.probe_address))
        peers = [Peer(index, pid) for index, pid, _ in processes]
        self.instances = [peer.instance for peer in peers]
        self._pids = [peer.pid for peer in peers]
        readable = all(self._memory.works_with(pid, address) for _, pid, address in processes)
        self.can_read = all(local.all_gather(readable))
        cores = _count_cores(local)
        cores_are_short = self.size > cores
        self.barrier = HostBarrier(
            window.common[window.num_bytes :],
            peers,
            self.position,
            cores_are_short=cores_are_short,
            limits=limits,
        )
        self.slot_bytes = size = window.num_bytes // 2
        self.slots = [
            [part[turn * size : (turn + 1) * size] for part in window.parts] for turn in (0, 1)
        ]
        self.results = [window.common[turn * size : (turn + 1) * size] for turn in (0, 1)]
        # Larger arrays are copied from process to process.
        limit = _DIRECT_BROADCAST_WHEN_CORES_ARE_SHORT if cores_are_short else _NEVER
        self._max_broadcast_bytes = _DIRECT_BROADCAST.get(self.size, limit)
        self._max_slot_bytes = _DIRECT_GATHER.get(self.size, _NEVER)
        # Which slots and headers the last meeting used.
        self.current_turn = 0
        self.one_shot_bytes = self._one_shot_limit(cores)

    def _one_shot_limit(self, cores: int) -> int:
        """Return the size up to which a one-shot all-reduce is faster than reducing in slices.

        One-shot takes one barrier and slices take two. With P instances, one-shot reduces P arrays
        on each; slices reduce and copy two.
        """
        if self.size <= 2:
            return _ONE_SHOT_BYTES_OF_TWO
        recalled = size_thresholds.recall(self.size, cores) if self.position == 0 else None
        limit: int | None = self.local.broadcast(recalled)
        if limit is None:
            seconds = size_thresholds.measure(lambda: self.barrier.wait_for_all("init"))
            per_barrier, per_byte = np.max(self.local.all_gather(seconds), axis=0).tolist()
            limit = int(per_barrier / per_byte / (self.size - 2))
            if self.position == 0:
                size_thresholds.remember(self.size, cores, limit)
        return min(limit, CHUNK_BYTES)

    def next_turn(self) -> int:
        """Return which slots and headers to use now: nobody reads those of the turn before last."""
        self.current_turn = turn = 1 - self.current_turn
        return turn

    @property
    def coming_turn(self) -> int:
        """What ``next_turn`` will return."""
        return 1 - self.current_turn

    def wait_for_same_call(self, plan: CallPlan, turn: int) -> None:
        """Wait for the others; afterwards this instance may read what they wrote before.

        Raises:
            CollectiveMismatchError: the instances make different calls.
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        if not self.barrier.compare(turn, plan.code, plan.signature):
            raise mismatch(self.descriptions(plan.signature), self.instances, self.names)

    def reduce_one_shot(self, plan: CallPlan, flat: Array, out: Array | None) -> None:
        """Copy ``flat`` into the own slot, meet, and reduce to ``out`` what the plan says.

        Without ``out`` the others alone have the result.
        """
        assert plan.one_shot is not None
        assert plan.reduction is not None
        turn = self.next_turn()
        plan.slots[turn][self.position][...] = flat  # np.copyto() takes twice as long, cold or hot
        self.wait_for_same_call(plan, turn)
        if out is not None:
            plan.reduction.reduce_chunk(plan.one_shot[turn], out)

    def gather_one_shot(self, plan: CallPlan, data: Array, rows: Sequence[Array] | Array) -> None:
        """Copy ``data`` into the own slot, meet, and fill row i of ``rows`` from that of i."""
        turn = self.next_turn()
        slots = plan.slots[turn]
        slots[self.position][...] = data
        self.wait_for_same_call(plan, turn)
        for row, slot in zip(rows, slots, strict=False):
            row[...] = slot

    def scatter_one_shot(
        self, plan: CallPlan, rows: Sequence[Array], out: Array, root: int
    ) -> None:
        """Copy the rows of the root into its slot, meet, and take the own one from there."""
        turn, size = self.next_turn(), out.size
        slot = plan.slots[turn][root]
        for position, row in enumerate(rows):
            slot[position * size : (position + 1) * size] = row
        self.wait_for_same_call(plan, turn)
        out[...] = slot[self.position * size : (self.position + 1) * size]

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the description of every call, after all have seen that calls differ."""
        slots = self.slots[self.next_turn()]
        data = signature.description.encode()[: self.slot_bytes - 1]
        slots[self.position][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)
        self.barrier.wait_for_all(signature)
        return [slot.tobytes().partition(b"\0")[0].decode(errors="replace") for slot in slots]

    def broadcast(self, data: Array, root: int, plan: CallPlan) -> None:
        """Overwrite the bytes ``data`` with those of the instance at position ``root``."""
        if self.size == 1:
            return
        if self.can_read and data.size > self._max_broadcast_bytes:
            self._broadcast_directly(data, root, plan)
            return
        for start in range(0, max(data.size, 1), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            slot = self.slots[turn][root][: chunk.size]
            if root == self.position:
                np.copyto(slot, chunk)
            self.wait_for_same_call(plan, turn)
            if root != self.position:
                np.copyto(chunk, slot)

    def _broadcast_directly(self, data: Array, root: int, plan: CallPlan) -> None:
        """Let the root write a share of the bytes to every other instance, which reads the rest."""
        with exposed(data):
            addresses = self._meet_with_addresses(data, plan)
            share = data.size // self.size
            if self.position != root:
                self.read(root, addresses[root] + share, data[share:], plan)
            else:
                for position in self.others():
                    self.write_bytes(position, addresses[position], data.ctypes.data, share)
            self.barrier.wait_for_all(plan.signature)

    def gather_bytes(
        self, data: Array, plan: CallPlan, root: int | None = None
    ) -> list[Array] | None:
        """Return the bytes ``data`` of every instance, which may differ in length.

        With a ``root``, only the instance at this position gets them; the others get None.
        """
        sizes = np.zeros((self.size, 1), np.int64)
        self.gather(np.array([data.size]).view(np.uint8), sizes.view(np.uint8), 8, plan)
        receives = root is None or root == self.position
        rows = [np.empty(size, np.uint8) for size in sizes[:, 0].tolist()] if receives else []
        self.gather(data, rows, int(sizes.max()), plan)
        return rows if receives else None

    def gather(
        self, data: Array, rows: Sequence[Array] | Array, longest: int, plan: CallPlan
    ) -> None:
        """Fill row i of ``rows`` with the bytes ``data`` of the instance at position i.

        Args:
            data: of this instance.
            rows: one for each instance, as long as its data; none where nobody needs them.
            longest: size of the largest ``data`` of all instances.
            plan: of the call.
        """
        if self.size == 1:
            for row in rows:
                np.copyto(row, data)
            return
        if self.can_read and longest > self._max_slot_bytes:
            self._gather_directly(data, rows, plan)
            return
        for start in range(0, max(1, longest), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            np.copyto(self.slots[turn][self.position][: chunk.size], chunk)
            self.wait_for_same_call(plan, turn)
            for row, slot in zip(rows, self.slots[turn], strict=False):
                row_chunk = row[start : start + self.slot_bytes]
                np.copyto(row_chunk, slot[: row_chunk.size])

    def _gather_directly(self, data: Array, rows: Sequence[Array] | Array, plan: CallPlan) -> None:
        addresses = self._meet_with_addresses(data, plan)
        if len(rows):
            own = rows[self.position]
            if own.ctypes.data != data.ctypes.data:  # the caller may gather in place
                np.copyto(own, data)
            for position in self.others():
                self.read(position, addresses[position], rows[position], plan)
        self.barrier.wait_for_all(plan.signature)

    def is_gathered_one_shot(self, num_bytes: int) -> bool:
        """Tell whether ``gather_one_shot`` is the way for arrays of this size."""
        is_read = self.can_read and num_bytes > self._max_slot_bytes
        return num_bytes <= self.slot_bytes and not is_read

    def close(self) -> None:
        """Leave the other instances."""
        self.barrier.close()
        self._memory.close()

    def others(self) -> list[int]:
        """Return the other positions, beginning with the next: not all read one at a time."""
        return [(self.position + step) % self.size for step in range(1, self.size)]

    def _meet_with_addresses(self, data: Array, plan: CallPlan) -> list[int]:
        """Wait for the same call of all, and return the addresses of their data."""
        turn = self.next_turn()
        if not self.barrier.compare(turn, plan.code, plan.signature, address=data.ctypes.data):
            raise mismatch(self.descriptions(plan.signature), self.instances, self.names)
        return self.barrier.published(turn)[1]

    def read(self, position: int, address: int, out: Array, plan: CallPlan) -> None:
        """Fill ``out`` from the memory of another instance.

        Raises:
            InstanceLostError: the other instance has ended; as with ``read_bytes``.
            OSError: the kernel forbids the read, although it permitted one at the start.
        """
        self.read_bytes(position, address, out.ctypes.data, out.nbytes, plan)

    def read_bytes(
        self, position: int, address: int, own_address: int, size: int, plan: CallPlan
    ) -> None:
        """Copy ``size`` bytes of another instance to ``own_address``.

        Raises:
            InstanceLostError: the other instance has ended. This one has not arrived at another
                meeting, so nobody takes its part of the result for complete.
            OSError: the kernel forbids the read, although it permitted one at the start.
        """
        try:
            self._memory.read_bytes(self._pids[position], address, own_address, size)
        except ProcessLookupError:
            self.barrier.give_up(position, plan.signature)

    def write_bytes(self, position: int, address: int, own_address: int, size: int) -> None:
        """Copy ``size`` bytes at ``own_address`` to another instance, if it has not ended.

        What one that ended does not receive nobody misses: the next meeting finds it.

        Raises:
            OSError: the kernel forbids the write, although it permitted one at the start.
        """
        with suppress(ProcessLookupError):
            self._memory.write_bytes(self._pids[position], address, own_address, size)
