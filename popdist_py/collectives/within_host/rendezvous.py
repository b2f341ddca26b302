"""Where the instances of one host meet: arrival counters in shared memory, and sleeping on them.

Whoever waits reads the counters for a moment and then sleeps in the kernel (futex), so that waiting
takes no core from those that work. Needs the memory order of x86: stores are seen in their order.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array

__all__ = ["Peer", "Rendezvous", "is_supported", "last_words_seconds"]

_LINE = 64  # bytes of a cache line: each instance writes to its own
# Words of a line: the counter, and the parts of the two headers.
_CODE, _PLACE, _ADDRESS = 1, 3, 5
_FUTEX, _WAIT, _WAKE = 202, 0, 1
# A wait begins with reading the counter, 50 ns each time, and goes on with letting others run on
# this core, which is cheaper than sleeping and waking if they are the ones waited for. If they are
# strangers, it takes long, and is not repeated.
_SPINS, _SPINS_WHEN_CORES_ARE_SHORT, _YIELD_SECONDS = 400, 20, 300e-6
# How often a sleeper looks whether the one it waits for is still there.
_LOOK_SECONDS = 0.1


def is_supported() -> bool:
    """Tell whether this machine has what ``Rendezvous`` needs."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance of this host: its index in the job and its process."""

    instance: int
    pid: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def last_words_seconds(hang_timeout: float) -> float:
    """Return how long an instance that has gone is waited for before that is an error.

    A launcher ends the job meanwhile and reports why the first one ended; errors of those who
    waited for it would only hide that.
    """
    return min(2.0, hang_timeout / 2)


class Rendezvous:
    """Lets the instances of one host wait for one another.

    Every instance has two headers, used in turns: numbers that the others may read after a
    ``meet`` and until the next but one.

    Args:
        memory: of ``size(number of peers)`` bytes, shared, zero at the start.
        peers: the instances of this host, in an order that all of them use.
        position: of this instance in ``peers``.
        cores_are_short: whether there are fewer cores than instances.
        hang_timeout: seconds after which a wait is given up.
    """

    def __init__(
        self,
        memory: Array,
        peers: Sequence[Peer],
        position: int,
        *,
        cores_are_short: bool,
        hang_timeout: float,
    ) -> None:
        count = len(peers)
        self._memory = memory
        self._words = memoryview(memory[: _LINE * count]).cast("Q")  # type: ignore[arg-type]
        self._asleep = memoryview(memory[_LINE * count : _LINE * count + count])  # type: ignore[arg-type]
        self._nobody = bytes(count)
        self._peers = peers
        self._position = position
        self._mine = position * 8
        self._others = [place * 8 for place in range(count) if place != position]
        self._arrived = 0
        self._spins = _SPINS_WHEN_CORES_ARE_SHORT if cores_are_short else _SPINS
        self._hang_timeout = hang_timeout
        self._address = memory.ctypes.data
        self._fence = threading.Lock()
        self._processes: dict[int, int] = {}
        self._gone_since: dict[int, float] = {}
        self.lost: InstanceLostError | None = None
        self.lost_instance = -1
        libc = ctypes.CDLL(None)
        self._yield = libc.sched_yield  # unlike Python's own, it lets other threads run
        self._futex = libc.syscall
        self._futex.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint32,
            ctypes.POINTER(_Timespec),
        )

    @staticmethod
    def size(count: int) -> int:
        """Return the bytes of shared memory for ``count`` instances."""
        return (_LINE + 1) * count

    def meet(self, turn: int, code: int, doing: object, place: int = 0, address: int = 0) -> bool:
        """Show a header, wait until all have arrived, and tell whether all show the same code.

        Args:
            turn: which of the two headers to use, 0 or 1 in alternation.
            code: what is compared.
            doing: what to call this in messages.
            place: a second number, for ``shown``.
            address: a third one.

        Raises:
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        words, at = self._words, self._mine + turn
        words[at + _CODE] = code
        if address:
            words[at + _PLACE] = place
            words[at + _ADDRESS] = address
        self.wait_for_all(doing)
        # A plain loop: twice as fast as all() with a generator, in every single call.
        for other in self._others:  # noqa: SIM110
            if words[other + _CODE + turn] != code:
                return False
        return True

    def shown(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the places and the addresses that the instances showed in this turn."""
        words, starts = self._words, range(turn, 8 * len(self._peers), 8)
        return [words[at + _PLACE] for at in starts], [words[at + _ADDRESS] for at in starts]

    def wait_for_all(self, doing: object, grace: float = 0.0) -> None:
        """Return once all instances have called this as often as this one.

        Args:
            doing: what to call this in messages.
            grace: seconds more than the hang time-out.

        Raises:
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        if self.lost is not None:
            raise self.lost
        words = self._words
        self._arrived = arrived = self._arrived + 1
        words[self._mine] = arrived
        # Taking a lock is a full memory barrier: the counter is out before sleepers are looked for.
        self._fence.acquire()
        self._fence.release()
        if self._asleep.tobytes() != self._nobody:
            self._futex(_FUTEX, self._address + self._mine * 8, _WAKE, 1 << 30, None)
        for other in self._others:
            if words[other] < arrived:
                self._wait_for(other, arrived, doing, grace)

    def _wait_for(self, other: int, arrived: int, doing: object, grace: float) -> None:
        words = self._words
        # A thread in the background must not keep the interpreter from the program: it sleeps.
        if threading.current_thread() is threading.main_thread():
            for _ in range(self._spins):
                if words[other] >= arrived:
                    return
            end = time.perf_counter() + _YIELD_SECONDS
            while time.perf_counter() < end:
                self._yield()
                if words[other] >= arrived:
                    return
        start = time.monotonic()
        pause = _Timespec(0, int(_LOOK_SECONDS * 1e9))
        self._asleep[self._position] = 1
        try:
            while (seen := words[other]) < arrived:
                word = self._address + other * 8
                self._futex(_FUTEX, word, _WAIT, seen & 0xFFFFFFFF, pause)
                waited = time.monotonic() - start
                if words[other] < arrived and waited > _LOOK_SECONDS:
                    self._look(other, arrived, waited - grace, doing)
        finally:
            self._asleep[self._position] = 0

    def _look(self, other: int, arrived: int, waited: float, doing: object) -> None:
        """Raise an error if waiting has become pointless."""
        peer = self._peers[other // 8]
        gone = self._has_ended(peer.pid)
        if self._words[other] >= arrived:
            return
        if gone:
            since = self._gone_since.setdefault(other, time.monotonic())
            if time.monotonic() - since < last_words_seconds(self._hang_timeout):
                return
            reason = "ended"
        elif waited > self._hang_timeout:
            reason = f"did not arrive within {self._hang_timeout:g} s (POPDIST_HANG_TIMEOUT)"
        else:
            return
        self.lost_instance = peer.instance
        self.lost = InstanceLostError(
            f"{doing}: instance {peer.instance} (process {peer.pid}) {reason}"
        )
        raise self.lost

    def _has_ended(self, pid: int) -> bool:
        """Tell whether a process has ended, also when its parent has not collected it yet."""
        try:
            if pid not in self._processes:
                self._processes[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # no pidfd here: only the time-out is left
            return False
        return bool(select.select([self._processes[pid]], [], [], 0)[0])

    def close(self) -> None:
        """Close what was opened to watch the others."""
        while self._processes:
            os.close(self._processes.popitem()[1])
