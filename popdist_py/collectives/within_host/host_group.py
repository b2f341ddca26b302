"""The group of the instances of one host: shared memory, a barrier, and calls that copy bytes.

A slot is a part of the window, the memory that the instances share. An instance copies data into
its slot, all instances wait at the barrier, and then the other instances read the slot. Each
instance has two slots, slot 0 and slot 1, and uses them alternately. ``turn`` is 0 or 1, the number
of the slots that one step of a call uses. A slot is overwritten only after the next barrier, when
all instances have finished reading it.

This module does not connect to other hosts. The only method here that reduces arrays is
``HostGroup.reduce_one_shot``.
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

# The size of a slot in bytes. A barrier is slow if there are fewer cores than instances. Slots are
# larger on hosts with few cores, so that a call needs fewer barriers.
_SLOT_BYTES, _SLOT_BYTES_WHEN_CORES_ARE_SHORT = 512 * 1024, 1024 * 1024
# With two instances, arrays up to this size are reduced faster in one shot than in slices.
_ONE_SHOT_BYTES_OF_TWO = CHUNK_BYTES


@dataclass(slots=True)
class CallPlan:
    """The values that all calls with the same signature have in common.

    Attributes:
        signature: The description of the call: its name, options, dtype and shape.
        code: A hash of the signature. The instances compare their codes to detect different calls.
        reduction: The reduction that combines elements; None for calls that only copy elements.
        slots: The slots 0 of all instances of the host, and the slots 1, as arrays of the call's
            dtype.
        results: Two shared arrays of a slot's size, used alternately, which all instances write and
            read.
        one_shot: The parts of ``slots`` that this instance reduces in a one-shot call; None if the
            array is too large for a one-shot call.
        is_compared_with_data: Whether the array is sent in the message with which the hosts compare
            their calls.
        in_tree_order: Whether the arrays are reduced in an order that does not depend on the hosts.

    Instances may delete a plan at different times, so a plan must not store results of calls.
    """

    signature: Signature
    code: int
    reduction: Reduction | None = None
    slots: tuple[list[Array], list[Array]] = ((), ())  # type: ignore[assignment]
    results: tuple[Array, ...] = ()
    one_shot: tuple[list[Array], list[Array]] | None = None
    is_compared_with_data: bool = False
    in_tree_order: bool = False


class Agreement(NamedTuple):
    """The locations in memory of the arrays that the instances pass to one call.

    The instances exchange these locations when they check that they make the same call.

    Attributes:
        all_in_window: Whether, on every host, the arrays of all instances are at the same location
            in shared memory.
        some_in_window: Whether at least one array of this host is in shared memory.
        all_movable: Whether all arrays of this host may be moved to shared memory.
        addresses: For each instance of this host, the address of its array in its own process.
    """

    all_in_window: bool
    some_in_window: bool
    all_movable: bool
    addresses: Sequence[int]


# The arrays of this process into which other instances may write. Each call of ``exposed`` adds its
# array under a new key, because several threads may call ``exposed`` at once.
_exposed_arrays: dict[object, Array] = {}


@contextmanager
def exposed(array: Array) -> Iterator[None]:
    """Keep ``array`` allocated while other instances may write into it.

    After a failed call the array stays allocated until the process ends. A late instance may still
    write to the address of the array. If the array were freed, a late write could overwrite other
    data. After a CollectiveMismatchError, no instance writes to the array, so it may be freed.
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
    """Return a new window for the instances of one host, which must all call this function.

    Raises:
        WindowError: The instances of this host cannot share memory.
    """
    size = local.size
    cores_are_short = size > _count_cores(local)
    slot_bytes = _SLOT_BYTES_WHEN_CORES_ARE_SHORT if cores_are_short else _SLOT_BYTES
    return Window(local, 2 * slot_bytes, 2 * slot_bytes + HostBarrier.size(size))


def _count_cores(local: Meeting) -> int:
    """Return the number of cores that the instances of this host may use together."""
    return len(set[int]().union(*local.all_gather(sorted(os.sched_getaffinity(0)))))


class HostGroup:
    """The group of the instances of this host, which must all call the constructor.

    Args:
        local: The instances of this host, which exchange small values through this object.
        window: The shared memory of these instances, from ``make_window``.
        instance: Index of this instance in the job.
        limits: The time limits of waits, and the names of the instances in messages.
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
        self.cores_are_short = cores_are_short = self.size > cores
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
        # The number, 0 or 1, of the slots and of the barrier's headers that the last step used.
        self.current_turn = 0
        self.one_shot_bytes = self._one_shot_limit(cores)

    def _one_shot_limit(self, cores: int) -> int:
        """Return the size up to which a one-shot all-reduce is faster than reducing in slices.

        A one-shot reduction needs one barrier, and a reduction in slices needs two. With P
        instances, the one-shot reduction reads P arrays on each instance. In a reduction in slices,
        each instance reads and copies as many bytes as two arrays have.
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
        """Return the number, 0 or 1, of the slots and headers that the next step of a call uses.

        All instances have finished reading the slots and headers with the returned number, because
        the last step used the other number.
        """
        self.current_turn = turn = 1 - self.current_turn
        return turn

    @property
    def coming_turn(self) -> int:
        """The value that the next call of ``next_turn`` will return."""
        return 1 - self.current_turn

    def wait_for_same_call(self, plan: CallPlan, turn: int) -> None:
        """Wait until all instances make a collective call, and check that their calls are equal.

        Afterwards this instance may read the slots of the other instances.

        Raises:
            CollectiveMismatchError: The instances make different calls.
            InstanceLostError: Another instance ended, or did not reach the barrier in time.
        """
        if not self.barrier.compare(turn, plan.code, plan.signature):
            raise mismatch(self.descriptions(plan.signature), self.instances, self.names)

    def reduce_one_shot(self, plan: CallPlan, flat: Array, out: Array | None) -> None:
        """Copy ``flat`` to this instance's slot, and reduce all instances' slots into ``out``.

        An instance that passes None for ``out`` does not compute the result.
        """
        assert plan.one_shot is not None
        assert plan.reduction is not None
        turn = self.next_turn()
        # This assignment takes half as long as np.copyto().
        plan.slots[turn][self.position][...] = flat
        self.wait_for_same_call(plan, turn)
        if out is not None:
            plan.reduction.reduce_chunk(plan.one_shot[turn], out)

    def gather_one_shot(self, plan: CallPlan, data: Array, rows: Sequence[Array] | Array) -> None:
        """Copy ``data`` to this instance's slot, and fill each row with one instance's slot."""
        turn = self.next_turn()
        slots = plan.slots[turn]
        slots[self.position][...] = data
        self.wait_for_same_call(plan, turn)
        for row, slot in zip(rows, slots, strict=False):
            row[...] = slot

    def scatter_one_shot(
        self, plan: CallPlan, rows: Sequence[Array], out: Array, root: int
    ) -> None:
        """Copy the root's ``rows`` to its slot, and copy this instance's row from there to ``out``.

        The instance at position i receives row i. Only the root passes rows. On the other
        instances, ``rows`` is empty.
        """
        turn, size = self.next_turn(), out.size
        slot = plan.slots[turn][root]
        for position, row in enumerate(rows):
            slot[position * size : (position + 1) * size] = row
        self.wait_for_same_call(plan, turn)
        out[...] = slot[self.position * size : (self.position + 1) * size]

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the descriptions of all instances' calls, for the error about a mismatch."""
        slots = self.slots[self.next_turn()]
        data = signature.description.encode()[: self.slot_bytes - 1]
        slots[self.position][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)
        self.barrier.wait_for_all(signature)
        return [slot.tobytes().partition(b"\0")[0].decode(errors="replace") for slot in slots]

    def broadcast(self, data: Array, root: int, plan: CallPlan) -> None:
        """Overwrite ``data`` with the ``data`` of the instance at position ``root``."""
        if self.size == 1:
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

    def gather_bytes(
        self, data: Array, plan: CallPlan, root: int | None = None
    ) -> list[Array] | None:
        """Return the ``data`` of every instance, in arrays that may differ in length.

        If ``root`` is given, only the instance at position ``root`` gets the arrays.
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
        """Fill row i of ``rows`` with the ``data`` of the instance at position i.

        Args:
            data: The bytes of this instance.
            rows: One array for each instance, as long as the data of that instance. If this
                instance does not receive, ``rows`` is empty.
            longest: The size in bytes of the largest ``data`` that an instance passes.
            plan: Plan of the call.
        """
        if self.size == 1:
            for row in rows:
                np.copyto(row, data)
            return
        for start in range(0, max(1, longest), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            np.copyto(self.slots[turn][self.position][: chunk.size], chunk)
            self.wait_for_same_call(plan, turn)
            for row, slot in zip(rows, self.slots[turn], strict=False):
                row_chunk = row[start : start + self.slot_bytes]
                np.copyto(row_chunk, slot[: row_chunk.size])

    def is_gathered_one_shot(self, num_bytes: int) -> bool:
        """Tell whether arrays of ``num_bytes`` are small enough for ``gather_one_shot``."""
        return num_bytes <= self.slot_bytes

    def close(self) -> None:
        """Leave the group, and close its file descriptors."""
        self.barrier.close()
        self._memory.close()

    def others(self) -> list[int]:
        """Return the positions of the other instances, starting after this instance's own position.

        Each instance gets a different order, so that the instances do not all read the memory of
        one instance at the same time.
        """
        return [(self.position + step) % self.size for step in range(1, self.size)]

    def read(self, position: int, address: int, out: Array, plan: CallPlan) -> None:
        """Fill ``out`` with the bytes at ``address`` in the memory of another instance.

        Raises:
            InstanceLostError: The other instance has ended.
            OSError: The kernel forbids the read, although it permitted a test read when the group
                was made.
        """
        self.read_bytes(position, address, out.ctypes.data, out.nbytes, plan)

    def read_bytes(
        self, position: int, address: int, own_address: int, size: int, plan: CallPlan
    ) -> None:
        """Copy ``size`` bytes at ``address`` in another instance's memory to ``own_address``.

        Raises:
            InstanceLostError: The other instance has ended. After this error, this instance does
                not arrive at the next barrier. So the other instances do not use the part of the
                result that this instance did not finish.
            OSError: The kernel forbids the read, although it permitted a test read when the group
                was made.
        """
        try:
            self._memory.read_bytes(self._pids[position], address, own_address, size)
        except ProcessLookupError:
            self.barrier.give_up(position, plan.signature)

    def write_bytes(self, position: int, address: int, own_address: int, size: int) -> None:
        """Copy ``size`` bytes at ``own_address`` to ``address`` in another instance's memory.

        If the other instance has ended, this method does nothing, and the next barrier raises
        InstanceLostError.

        Raises:
            OSError: The kernel forbids the write, although it permitted a test write when the group
                was made.
        """
        with suppress(ProcessLookupError):
            self._memory.write_bytes(self._pids[position], address, own_address, size)
