"""The instances of one host: their shared window, their barrier, and moving bytes through it.

Nothing here knows other hosts, and nothing here reduces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from popdist_py.collectives import size_thresholds
from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array, Reduction
from popdist_py.collectives.signature import Signature, mismatch
from popdist_py.collectives.within_host.host_barrier import HostBarrier, Peer
from popdist_py.collectives.within_host.peer_memory import PeerMemory
from popdist_py.collectives.within_host.shared_window import Window

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CallPlan", "HostGroup", "make_window"]

# Size of the slot through which an instance passes data to the others. The window has two for each
# instance, used in alternation. Where instances share cores, barriers are slow, and larger slots
# need fewer of them.
_SLOT_BYTES, _SLOT_BYTES_WHEN_CORES_ARE_SHORT = 512 * 1024, 4 * 1024 * 1024
# Up to this size a one-shot all-reduce is faster with two instances.
_ONE_SHOT_BYTES_OF_TWO = CHUNK_BYTES // 2


@dataclass(slots=True)
class CallPlan:
    """The values that all calls with one signature have in common.

    Attributes:
        signature: of the call.
        code: of the signature.
        reduction: how elements are combined; None for calls that only move them.
        slots: for each turn, the slots of all instances of the host as arrays of the dtype.
        is_one_shot: whether every instance reduces the whole arrays of all, after one barrier.
    """

    signature: Signature
    code: int
    reduction: Reduction | None = None
    slots: tuple[list[Array], list[Array]] = ((), ())  # type: ignore[assignment]
    is_one_shot: bool = False


def make_window(local: MPI.Comm) -> Window:
    """Return the window of the instances of one host; collective.

    Raises:
        WindowError: memory cannot be shared on this host.
    """
    size = local.Get_size()
    cores_are_short = size > _count_cores(local)
    slot_bytes = _SLOT_BYTES_WHEN_CORES_ARE_SHORT if cores_are_short else _SLOT_BYTES
    return Window(local, 2 * slot_bytes, HostBarrier.size(size))


def _count_cores(local: MPI.Comm) -> int:
    """Return the number of cores that the instances of this host may use together."""
    return len(set[int]().union(*local.allgather(os.sched_getaffinity(0))))


class HostGroup:
    """The instances of this host; the constructor is collective.

    Args:
        local: the instances of this host, in order.
        window: their memory, from ``make_window``.
        instance: index of this instance in the job.
        hang_timeout: seconds after which a wait raises an error.
    """

    def __init__(self, local: MPI.Comm, window: Window, instance: int, hang_timeout: float) -> None:
        self.local = local
        self.position: int = local.Get_rank()
        self.size: int = local.Get_size()
        self._memory = PeerMemory()
        processes = local.allgather((instance, os.getpid(), self._memory.probe_address))
        peers = [Peer(index, pid) for index, pid, _ in processes]
        self.instances = [peer.instance for peer in peers]
        self._pids = [peer.pid for peer in peers]
        readable = all(self._memory.works_with(pid, address) for _, pid, address in processes)
        self.can_read = all(local.allgather(readable))
        cores = _count_cores(local)
        self.barrier = HostBarrier(
            window.common,
            peers,
            self.position,
            cores_are_short=self.size > cores,
            hang_timeout=hang_timeout,
        )
        self.slot_bytes = size = window.num_bytes // 2
        self.slots = [
            [part[turn * size : (turn + 1) * size] for part in window.parts] for turn in (0, 1)
        ]
        self._turn = 0
        self.one_shot_bytes = self._one_shot_limit(cores)

    def _one_shot_limit(self, cores: int) -> int:
        """Return the size up to which a one-shot all-reduce is faster than reducing in slices.

        One-shot takes one barrier and slices take two. With P instances, one-shot reduces P arrays
        on each; slices reduce and copy two.
        """
        if self.size <= 2:
            return _ONE_SHOT_BYTES_OF_TWO
        recalled = size_thresholds.recall(self.size, cores) if self.position == 0 else None
        limit: int | None = self.local.bcast(recalled, root=0)
        if limit is None:
            seconds = size_thresholds.measure(lambda: self.barrier.wait_for_all("init"))
            per_barrier, per_byte = np.max(self.local.allgather(seconds), axis=0).tolist()
            limit = int(per_barrier / per_byte / (self.size - 2))
            if self.position == 0:
                size_thresholds.remember(self.size, cores, limit)
        return min(limit, CHUNK_BYTES)

    def next_turn(self) -> int:
        """Return which slots and headers to use now: nobody reads those of the turn before last."""
        self._turn = turn = 1 - self._turn
        return turn

    def wait_for_same_call(self, plan: CallPlan, turn: int) -> None:
        """Wait for the others; afterwards this instance may read what they wrote before.

        Raises:
            CollectiveMismatchError: the instances make different calls.
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        if not self.barrier.compare(turn, plan.code, plan.signature):
            raise mismatch(self.descriptions(plan.signature))

    def descriptions(self, signature: Signature) -> list[str]:
        """Return the call of every instance in words, after all have seen that calls differ."""
        slots = self.slots[self.next_turn()]
        data = str(signature).encode()[: self.slot_bytes - 1]
        slots[self.position][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)
        self.barrier.wait_for_all(signature)
        return [slot.tobytes().partition(b"\0")[0].decode(errors="replace") for slot in slots]

    def broadcast(self, data: Array, root: int, plan: CallPlan) -> None:
        """Overwrite the bytes ``data`` with those of the instance at position ``root``."""
        for start in range(0, max(data.size, 1), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            slot = self.slots[turn][root][: chunk.size]
            if root == self.position:
                np.copyto(slot, chunk)
            self.wait_for_same_call(plan, turn)
            if root != self.position:
                np.copyto(chunk, slot)

    def gather(self, data: Array, rows: Sequence[Array], plan: CallPlan) -> None:
        """Fill row i of ``rows`` with the bytes ``data`` of the instance at position i."""
        for start in range(0, max(1, *(row.size for row in rows)), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            np.copyto(self.slots[turn][self.position][: chunk.size], chunk)
            self.wait_for_same_call(plan, turn)
            for row, slot in zip(rows, self.slots[turn], strict=True):
                row_chunk = row[start : start + self.slot_bytes]
                np.copyto(row_chunk, slot[: row_chunk.size])

    def read(self, position: int, address: int, out: Array, plan: CallPlan) -> None:
        """Fill ``out`` from the memory of another instance.

        Raises:
            InstanceLostError: the other instance has ended.
            OSError: the kernel forbids the read, although it permitted one at the start.
        """
        try:
            self._memory.read(self._pids[position], address, out)
        except ProcessLookupError:
            # The wait for a process that has ended raises the error that names it.
            self.barrier.wait_for_all(plan.signature)
            raise
