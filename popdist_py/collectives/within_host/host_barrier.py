"""The barrier of the instances of one host: arrival counters in shared memory.

An instance that waits reads the counters for a moment and then sleeps in the kernel (futex), so
that waiting takes no core from instances that work. The barrier needs the memory order of x86:
other cores see stores in program order.

Other counters in the same memory are waited for in the same way. Nothing here moves or reduces
data.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from popdist_py.collectives.patience import Patience
from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array

__all__ = ["NO_CODE", "HostBarrier", "Peer", "is_supported", "launcher_grace_seconds"]

# Bytes of a cache line. Each instance writes to its own line.
_LINE = 64
# 8-byte words of a line: word 0 is the arrival counter; the fields of the two headers follow.
_WORDS_PER_LINE = 8
_CODE, _LOCATION, _ADDRESS = 1, 3, 5
# No call has this code; an instance that has seen calls differ comes to the next meeting with it.
NO_CODE = 0
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
# A wait first reads the counter in a loop, 50 ns each time: where cores are short not at all, since
# the peer may need this core. It then yields the core to other processes, which is cheaper than
# sleeping and waking if one of them is the peer waited for. If they are unrelated, a yield takes
# long, and ends this phase.
_SPINS, _LONG_YIELD_SECONDS = 400, 300e-6
# Where every instance has a core of its own, sleeping frees nothing that another instance needs,
# and the one that arrives last pays 30 to 100 us for waking the others: the core left idle has
# slept too. Instances that compute the same are apart by less than this. Longer waits sleep.
_YIELD_SECONDS, _YIELD_SECONDS_WHEN_CORES_ARE_SHORT = 5e-3, 300e-6
# How often a sleeping instance checks that the process it waits for is alive.
_LIVENESS_CHECK_SECONDS = 0.1


def is_supported() -> bool:
    """Tell whether this machine has what ``HostBarrier`` needs."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance of this host: its index in the job and its process."""

    instance: int
    pid: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def launcher_grace_seconds(hang_timeout: float) -> float:
    """Return how long an instance waits after a peer has ended before it raises an error.

    Meanwhile the launcher ends the job and reports why the first instance ended. Errors of the
    instances that waited for it would only hide that reason.
    """
    return min(2.0, hang_timeout / 2)


class HostBarrier:
    """Lets the instances of one host wait for one another.

    Every instance publishes a header with each ``compare``. It has two, used in alternation, so the
    others may read a header until the next ``compare`` but one.

    Args:
        memory: ``size(number of peers)`` bytes, shared, zero at the start; what follows them, whole
            words, is for other counters.
        peers: the instances of this host, in an order that all of them use.
        position: of this instance in ``peers``.
        cores_are_short: whether there are fewer cores than instances.
        hang_timeout: seconds after which a wait raises an error.
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
        self.words = self._words = memoryview(memory).cast("Q")  # type: ignore[arg-type]
        self._asleep = memoryview(memory[_LINE * count : _LINE * count + count])  # type: ignore[arg-type]
        self._nobody_asleep = bytes(count)
        self._peers = peers
        self._position = position
        self._own_line = position * _WORDS_PER_LINE
        self._other_lines = [peer * _WORDS_PER_LINE for peer in range(count) if peer != position]
        self._arrivals = 0
        self._spins = 0 if cores_are_short else _SPINS
        self._yield_seconds = (
            _YIELD_SECONDS_WHEN_CORES_ARE_SHORT if cores_are_short else _YIELD_SECONDS
        )
        self._hang_timeout = hang_timeout
        self._address = memory.ctypes.data
        self._fence = threading.Lock()
        self._pidfds: dict[int, int] = {}
        self._ended_since: dict[int, float] = {}
        # A number for the calls that were not compared in a meeting; the next one compares it.
        self.past_calls = 0
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1
        libc = ctypes.CDLL(None)
        # Other threads may run: ctypes releases the interpreter's lock, which os.sched_yield keeps.
        self._yield = libc.sched_yield
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
        """Return the bytes of shared memory for ``count`` instances, whole lines."""
        return _LINE * (count + -(-count // _LINE))

    def compare(
        self, turn: int, code: int, call: object, location: int = 0, address: int = 0
    ) -> bool:
        """Publish a header, wait for all instances, and tell whether all published the same code.

        They do not where ``past_calls`` differ, nor where this code is ``NO_CODE``.

        Args:
            turn: which of the two headers to use, 0 or 1 in alternation.
            code: the number that is compared.
            call: the collective call, as messages name it.
            location: a second number, for ``published``.
            address: a third number, for ``published``.

        Raises:
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        words, header = self._words, self._own_line + turn
        if code:
            code ^= self.past_calls
        words[header + _CODE] = code
        if address:
            words[header + _LOCATION] = location
            words[header + _ADDRESS] = address
        self.wait_for_all(call)
        # A plain loop is twice as fast as all() with a generator, and runs in every call.
        for line in self._other_lines:
            if words[line + _CODE + turn] != code:
                return False
        return code != NO_CODE

    def published(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the locations and the addresses that the instances published in this turn."""
        words = self._words
        headers = range(turn, _WORDS_PER_LINE * len(self._peers), _WORDS_PER_LINE)
        locations = [words[header + _LOCATION] for header in headers]
        return locations, [words[header + _ADDRESS] for header in headers]

    def wait_for_all(self, call: object, grace: float = 0.0) -> None:
        """Return once all instances have called this as often as this one.

        Args:
            call: the collective call, as messages name it.
            grace: seconds to wait in addition to the hang time-out.

        Raises:
            InstanceLostError: another instance ended, or did not arrive in time.
        """
        if self.lost_error is not None:
            raise self.lost_error
        words = self._words
        self._arrivals = arrived = self._arrivals + 1
        words[self._own_line] = arrived
        # Taking a lock is a full memory barrier: other cores see the counter before this one reads
        # who sleeps.
        self._fence.acquire()
        self._fence.release()
        if self._asleep.tobytes() != self._nobody_asleep:
            self._wake(self._own_line)
        for line in self._other_lines:
            if words[line] < arrived:
                self._wait_for(line, arrived, line // _WORDS_PER_LINE, call, grace)

    def has_arrived_before(self, position: int) -> bool:
        """Tell whether another instance waits in a meeting to which this one has not come."""
        return self._words[position * _WORDS_PER_LINE] > self._arrivals

    def set_counter(self, word: int, value: int) -> None:
        """Write a counter of this instance, for which others may wait."""
        self._words[word] = value
        self._fence.acquire()
        self._fence.release()
        if self._asleep.tobytes() != self._nobody_asleep:
            self._wake(word)

    def wait_for_counter(
        self, word: int, value: int, position: int, call: object, is_hopeless: Callable[[], bool]
    ) -> bool:
        """Wait until a counter of the instance at ``position`` has ``value``.

        Args:
            word: index of the counter in ``words``.
            value: what to wait for.
            position: of the instance that sets it.
            call: the collective call, as messages name it.
            is_hopeless: tells that the instance never will, once it is known; asked now and then.

        Returns:
            Whether it has; otherwise the wait was hopeless.

        Raises:
            InstanceLostError: the instance ended, or did not get there in time.
        """
        if self.lost_error is not None:
            raise self.lost_error
        self._wait_for(word, value, position, call, is_hopeless=is_hopeless)
        return self._words[word] >= value

    def _wake(self, word: int) -> None:
        self._futex(_SYS_FUTEX, self._address + word * 8, _FUTEX_WAKE, 1 << 30, None)

    def _wait_for(
        self,
        word: int,
        value: int,
        position: int,
        call: object,
        grace: float = 0.0,
        is_hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        words = self._words
        # A background thread sleeps at once: spinning would keep the interpreter from the program.
        if threading.current_thread() is threading.main_thread():
            for _ in range(self._spins):
                if words[word] >= value:
                    return
            now = time.perf_counter()
            deadline = now + self._yield_seconds
            while now < deadline:
                began = now
                self._yield()
                if words[word] >= value:
                    return
                now = time.perf_counter()
                if now - began > _LONG_YIELD_SECONDS:
                    break
        patience = Patience()
        timeout = _Timespec(0, int(_LIVENESS_CHECK_SECONDS * 1e9))
        self._asleep[self._position] = 1
        try:
            while (counter := words[word]) < value and not is_hopeless():
                address = self._address + word * 8
                self._futex(_SYS_FUTEX, address, _FUTEX_WAIT, counter & 0xFFFFFFFF, timeout)
                waited = patience.waited()
                if words[word] < value and waited > _LIVENESS_CHECK_SECONDS:
                    self._check_peer(word, value, position, waited - grace, call)
        finally:
            self._asleep[self._position] = 0

    def _check_peer(
        self, word: int, value: int, position: int, waited: float, call: object
    ) -> None:
        """Raise an error if the instance waited for has ended or is over the time-out."""
        peer = self._peers[position]
        ended = self._has_ended(peer.pid)
        if self._words[word] >= value:
            return
        if ended:
            since = self._ended_since.setdefault(position, time.monotonic())
            if time.monotonic() - since < launcher_grace_seconds(self._hang_timeout):
                return
            reason = "ended"
        elif waited > self._hang_timeout:
            reason = f"did not arrive within {self._hang_timeout:g} s (POPDIST_HANG_TIMEOUT)"
        else:
            return
        self._lose(peer, reason, call)

    def give_up(self, position: int, call: object) -> NoReturn:
        """Raise the error for an instance that has ended, without arriving at a meeting.

        Raises:
            InstanceLostError: always.
        """
        time.sleep(launcher_grace_seconds(self._hang_timeout))
        self._lose(self._peers[position], "ended", call)

    def _lose(self, peer: Peer, reason: str, call: object) -> NoReturn:
        self.lost_instance = peer.instance
        self.lost_error = InstanceLostError(
            f"{call}: instance {peer.instance} (process {peer.pid}) {reason}"
        )
        raise self.lost_error

    def _has_ended(self, pid: int) -> bool:
        """Tell whether a process has ended, also when its parent has not collected it yet."""
        try:
            if pid not in self._pidfds:
                self._pidfds[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # no pidfd on this kernel: only the time-out can tell
            return False
        return bool(select.select([self._pidfds[pid]], [], [], 0)[0])

    def close(self) -> None:
        """Close the pidfds of the other instances."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
