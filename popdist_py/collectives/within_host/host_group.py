"""The instances of one host: their shared window, how they meet there and pass bytes on.

Knows nothing of other hosts, nor of reducing.
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
from popdist_py.collectives.within_host.peer_memory import PeerMemory
from popdist_py.collectives.within_host.rendezvous import Peer, Rendezvous
from popdist_py.collectives.within_host.shared_window import Window

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Host", "Plan", "window_for"]

# What an instance shows the others at once: twice this in the window, used in turns. Where
# instances share cores, meetings are dear, and larger slots need fewer.
_SLOT_BYTES, _SLOT_BYTES_WHEN_CORES_ARE_SHORT = 512 * 1024, 4 * 1024 * 1024
# Up to here each of two instances reduces everything by itself.
_PAIR_BYTES = CHUNK_BYTES // 2


@dataclass(slots=True)
class Plan:
    """What is the same for all calls with one signature.

    Attributes:
        signature: of the call.
        code: of the signature.
        reduction: how elements are combined; None for calls that only move them.
        slots: for each turn, the slots of all instances of the host as arrays of the dtype.
        at_once: the array fits into a slot, and every instance reduces it by itself.
    """

    signature: Signature
    code: int
    reduction: Reduction | None = None
    slots: tuple[list[Array], list[Array]] = ((), ())  # type: ignore[assignment]
    at_once: bool = False


def window_for(local: MPI.Comm) -> Window:
    """Make the window of the instances of one host; collective.

    Raises:
        WindowError: memory cannot be shared on this host.
    """
    size = local.Get_size()
    are_short = size > _cores(local)
    slot = _SLOT_BYTES_WHEN_CORES_ARE_SHORT if are_short else _SLOT_BYTES
    return Window(local, 2 * slot, Rendezvous.size(size))


def _cores(local: MPI.Comm) -> int:
    """Return how many cores the instances of this host may use together."""
    return len(set[int]().union(*local.allgather(os.sched_getaffinity(0))))


class Host:
    """The instances of this host; making one is collective among them.

    Args:
        local: they, in order.
        window: theirs, made by ``window_for``.
        instance: index of this instance in the job.
        hang_timeout: seconds after which a wait is given up.
    """

    def __init__(self, local: MPI.Comm, window: Window, instance: int, hang_timeout: float) -> None:
        self.local = local
        self.position: int = local.Get_rank()
        self.size: int = local.Get_size()
        self._memory = PeerMemory()
        known = local.allgather((instance, os.getpid(), self._memory.probe_address))
        peers = [Peer(index, pid) for index, pid, _ in known]
        self.instances = [peer.instance for peer in peers]
        self._pids = [peer.pid for peer in peers]
        readable = all(self._memory.works_with(pid, address) for _, pid, address in known)
        self.can_read = all(local.allgather(readable))
        cores = _cores(local)
        self.rendezvous = Rendezvous(
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
        self.at_once_bytes = self._find_limit(cores)

    def _find_limit(self, cores: int) -> int:
        """Return up to which size every instance reduces everything by itself.

        That takes one meeting, where reducing in slices takes two; but it reduces P arrays where
        slices reduce and copy two.
        """
        if self.size <= 2:
            return _PAIR_BYTES
        known = size_thresholds.recall(self.size, cores) if self.position == 0 else None
        limit: int | None = self.local.bcast(known, root=0)
        if limit is None:
            mine = size_thresholds.measure(lambda: self.rendezvous.wait_for_all("init"))
            meeting, per_byte = np.max(self.local.allgather(mine), axis=0).tolist()
            limit = int(meeting / per_byte / (self.size - 2))
            if self.position == 0:
                size_thresholds.remember(self.size, cores, limit)
        return min(limit, CHUNK_BYTES)

    def next_turn(self) -> int:
        """Return which slots and headers to use now: those that nobody reads any more."""
        self._turn = turn = 1 - self._turn
        return turn

    def meet(self, plan: Plan, turn: int) -> None:
        """Wait for the others; what they wrote before may be read afterwards.

        Raises:
            CollectiveMismatchError: they are in different calls.
            InstanceLostError: one of them ended, or did not arrive in time.
        """
        if not self.rendezvous.meet(turn, plan.code, plan.signature):
            raise mismatch(self.calls(plan.signature))

    def calls(self, signature: Signature) -> list[str]:
        """Return what every instance says that it calls; all have seen a difference before."""
        slots = self.slots[self.next_turn()]
        data = str(signature).encode()[: self.slot_bytes - 1]
        slots[self.position][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)
        self.rendezvous.wait_for_all(signature)
        return [slot.tobytes().partition(b"\0")[0].decode(errors="replace") for slot in slots]

    def broadcast(self, data: Array, root: int, plan: Plan) -> None:
        """Overwrite the bytes ``data`` with those of the instance at position ``root``."""
        for start in range(0, max(data.size, 1), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            slot = self.slots[turn][root][: chunk.size]
            if root == self.position:
                np.copyto(slot, chunk)
            self.meet(plan, turn)
            if root != self.position:
                np.copyto(chunk, slot)

    def gather(self, data: Array, rows: Sequence[Array], plan: Plan) -> None:
        """Fill each of ``rows`` with the bytes ``data`` of one instance."""
        for start in range(0, max(1, *(row.size for row in rows)), self.slot_bytes):
            turn = self.next_turn()
            chunk = data[start : start + self.slot_bytes]
            np.copyto(self.slots[turn][self.position][: chunk.size], chunk)
            self.meet(plan, turn)
            for row, slot in zip(rows, self.slots[turn], strict=True):
                part = row[start : start + self.slot_bytes]
                np.copyto(part, slot[: part.size])

    def read(self, position: int, address: int, out: Array, plan: Plan) -> None:
        """Fill ``out`` from the memory of another instance.

        Raises:
            InstanceLostError: it has ended.
            OSError: its memory cannot be read, although that was possible before.
        """
        try:
            self._memory.read(self._pids[position], address, out)
        except ProcessLookupError:
            # Waiting for a process that has ended raises the error that names it.
            self.rendezvous.wait_for_all(plan.signature)
            raise
