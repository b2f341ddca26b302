"""The barrier of the instances of one host, with arrival counters in shared memory.

A waiting instance first reads the arrival counters in a loop, then yields its core, and at last
sleeps in the kernel (futex). While an instance sleeps, working instances can use its core. The
barrier needs the memory order of x86, where other cores see stores in program order.

This module does not copy or reduce arrays.
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
from typing import TYPE_CHECKING, NoReturn

from popdist_py import activities
from popdist_py.collectives.waiting import Span, WaitLimits, WaitTime
from popdist_py.errors import InstanceLostError

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array

__all__ = ["HostBarrier", "Peer", "is_supported"]

# The number of bytes of a cache line. Each instance writes only to its own cache line.
_LINE = 64
# A cache line has eight words of 8 bytes. Word 0 of an instance's cache line counts how often the
# instance has arrived at a barrier. A header is a group of numbers that an instance publishes.
# Every instance has two headers, so its cache line has two words for each of these numbers.
_WORDS_PER_LINE = 8
_CODE, _LOCATION, _ADDRESS = 1, 3, 5
# The last word of a cache line is 1 once the instance has left and will not arrive again.
_LEFT = 7
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
# A wait has three phases. In the first phase the waiting instance reads the arrival counter of the
# missing instance in a loop. Each read of the counter takes 50 ns. The first phase is skipped if
# there are fewer cores than instances. The missing instance may then need the core of the waiting
# instance. In the second phase the waiting instance yields its core to other processes. If the
# missing instance runs on the same core, yielding is cheaper than sleeping and waking. If a yield
# takes long, an unrelated process has used the core, and the second phase ends. In the third phase
# the waiting instance sleeps.
_SPINS, _LONG_YIELD_SECONDS = 400, 300e-6
# The duration in seconds of the phase in which a waiting instance yields its core. If every
# instance has its own core, the others cannot use the core of a sleeping instance. The instance
# that arrives last needs 30 to 100 us to wake an instance on an idle core. Instances that do the
# same computation usually arrive within 5 ms of one another.
_YIELD_SECONDS, _YIELD_SECONDS_WHEN_CORES_ARE_SHORT = 5e-3, 300e-6
# A sleeping instance checks at this interval, in seconds, that the missing instances are alive.
_LIVENESS_CHECK_SECONDS = 0.1


def is_supported() -> bool:
    """Tell whether ``HostBarrier`` works on this machine."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance of this host, with its index in the job and its process id."""

    instance: int
    pid: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class HostBarrier:
    """Lets the instances of one host wait for one another.

    Every call of ``compare`` writes a header, a group of numbers that the other instances read, to
    shared memory. Each instance has two headers and uses them alternately. So a header is
    overwritten only in the second following call of ``compare``.

    Args:
        memory: Shared memory of ``size(number of peers)`` bytes, zero at the start.
        peers: The instances of this host, in the same order on all of them.
        position: Position of this instance in ``peers``.
        cores_are_short: Whether there are fewer cores than instances.
        limits: The time limits of waits.
    """

    def __init__(
        self,
        memory: Array,
        peers: Sequence[Peer],
        position: int,
        *,
        cores_are_short: bool,
        limits: WaitLimits,
    ) -> None:
        count = len(peers)
        self._memory = memory
        self._words = memoryview(memory[: _LINE * count]).cast("Q")  # type: ignore[arg-type]
        self._asleep = memoryview(memory[_LINE * count : _LINE * count + count])  # type: ignore[arg-type]
        self._all_awake = bytes(count)
        self._peers = peers
        self._position = position
        self._own_line = position * _WORDS_PER_LINE
        self._other_lines = [peer * _WORDS_PER_LINE for peer in range(count) if peer != position]
        self._arrivals = 0
        self._spins = 0 if cores_are_short else _SPINS
        self._yield_seconds = (
            _YIELD_SECONDS_WHEN_CORES_ARE_SHORT if cores_are_short else _YIELD_SECONDS
        )
        self._limits = limits
        self._address = memory.ctypes.data
        self._fence = threading.Lock()
        self._pidfds: dict[int, int] = {}
        self._gone_since: dict[int, float] = {}
        self.lost_error: InstanceLostError | None = None
        self.lost_instance = -1
        libc = ctypes.CDLL(None)
        # Functions called through ctypes release the interpreter's lock, so that other threads of
        # this process can run. os.sched_yield() does not release the interpreter's lock.
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
        """Return the bytes of shared memory for ``count`` instances."""
        return (_LINE + 1) * count

    def compare(
        self, turn: int, code: int, call: object, location: int = 0, address: int = 0
    ) -> bool:
        """Publish a header, wait for all instances, and tell whether all published the same code.

        Args:
            turn: The number of the header to write. The caller passes 0 and 1 alternately.
            code: The number that the instances compare.
            call: The collective call, for error messages.
            location: A number that ``published`` returns on all instances.
            address: Another number that ``published`` returns on all instances. If ``address`` is
                0, the call publishes neither ``location`` nor ``address``.

        Raises:
            InstanceLostError: Another instance ended, or did not reach the barrier in time.
        """
        words, header = self._words, self._own_line + turn
        words[header + _CODE] = code
        if address:
            words[header + _LOCATION] = location
            words[header + _ADDRESS] = address
        self.wait_for_all(call)
        # A plain loop is twice as fast as all() with a generator, and runs in every call.
        for line in self._other_lines:  # noqa: SIM110
            if words[line + _CODE + turn] != code:
                return False
        return True

    def published(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the locations and addresses in header ``turn`` of every instance."""
        words = self._words
        headers = range(turn, _WORDS_PER_LINE * len(self._peers), _WORDS_PER_LINE)
        locations = [words[header + _LOCATION] for header in headers]
        return locations, [words[header + _ADDRESS] for header in headers]

    def wait_for_all(self, call: object, span: Span = Span.WITHIN_HOST) -> None:
        """Return once all instances have called this method as often as this instance.

        Args:
            call: The collective call, for error messages.
            span: The set of instances to wait for, which determines the time limit.

        Raises:
            InstanceLostError: Another instance ended, or did not reach the barrier in time.
        """
        if self.lost_error is not None:
            raise self.lost_error
        words = self._words
        self._arrivals = arrived = self._arrivals + 1
        words[self._own_line] = arrived
        # Taking a lock is a full memory barrier. Because of the memory barrier, other cores see the
        # new arrival counter before this core reads which instances sleep.
        self._fence.acquire()
        self._fence.release()
        if self._asleep.tobytes() != self._all_awake:
            self._futex(_SYS_FUTEX, self._address + self._own_line * 8, _FUTEX_WAKE, 1 << 30, None)
        for line in self._other_lines:
            if words[line] < arrived:
                with activities.doing(activities.WAITING):
                    self._wait_for(line, arrived, call, span)

    def _wait_for(self, line: int, arrived: int, call: object, span: Span) -> None:
        words = self._words
        # Only the main thread reads the arrival counter in a loop. A loop in a background thread
        # would keep the main thread from running Python code.
        if threading.current_thread() is threading.main_thread():
            for _ in range(self._spins):
                if words[line] >= arrived:
                    return
            now = time.perf_counter()
            deadline = now + self._yield_seconds
            while now < deadline:
                began = now
                self._yield()
                if words[line] >= arrived:
                    return
                now = time.perf_counter()
                if now - began > _LONG_YIELD_SECONDS:
                    break
        wait_time = WaitTime()
        timeout = _Timespec(0, int(_LIVENESS_CHECK_SECONDS * 1e9))
        self._asleep[self._position] = 1
        try:
            while (counter := words[line]) < arrived:
                address = self._address + line * 8
                self._futex(_SYS_FUTEX, address, _FUTEX_WAIT, counter & 0xFFFFFFFF, timeout)
                seconds = wait_time.seconds()
                try:
                    self._limits.check_abort(call)
                except InstanceLostError as error:
                    self.lost_error = error
                    raise
                if words[line] < arrived and seconds > _LIVENESS_CHECK_SECONDS:
                    is_late = seconds > self._limits.seconds(span)
                    self._check_peers(line, arrived, call, is_late=is_late)
        finally:
            self._asleep[self._position] = 0

    def _check_peers(self, line: int, arrived: int, call: object, *, is_late: bool) -> None:
        """Raise an error if a missing instance has left or is too late.

        The method checks all missing instances, not only the instance of ``line``. The instance of
        ``line`` may itself have left because another instance was lost. The error names the first
        instance that was found to have left.

        Args:
            line: The cache line, in shared memory, of the instance for which this instance waits.
            arrived: The arrival counter of each instance that has arrived at this barrier.
            call: The collective call, for error messages.
            is_late: Whether the wait has exceeded its time limit.
        """
        for missing in self._missing(arrived):
            pid, left = self._peer(missing).pid, self._words[missing + _LEFT]
            if left or self._has_ended(pid):
                self._gone_since.setdefault(missing, time.monotonic())
        # Check again which instances are missing, because an instance may have arrived at this
        # barrier and then left.
        missing_lines = self._missing(arrived)
        gone = [missing for missing in self._gone_since if missing in missing_lines]
        if gone:
            first = gone[0]
            passed = time.monotonic() - self._gone_since[first]
            if passed >= self._limits.launcher_grace:
                peer = self._peer(first)
                reason = "ended" if self._has_ended(peer.pid) else "has left the group"
                # An instance that has ended may have called ``close()`` before. The message then
                # says that the instance did not make this collective call.
                if reason == "ended" and self._words[first + _LEFT]:
                    reason = "ended without making this call"
                self._lose(peer, reason, call)
        elif is_late and line in missing_lines:
            limits = self._limits
            limit = f"{limits.call_timeout:g} s ({limits.names.time_limit})"
            self._lose(self._peer(line), f"did not make this call within {limit}", call)

    def _missing(self, arrived: int) -> list[int]:
        return [line for line in self._other_lines if self._words[line] < arrived]

    def _peer(self, line: int) -> Peer:
        return self._peers[line // _WORDS_PER_LINE]

    def give_up(self, position: int, call: object) -> NoReturn:
        """Raise the error for the instance at ``position``, which has ended.

        Later waits raise the same error, so this instance does not arrive at another barrier.

        Raises:
            InstanceLostError: This method always raises this error.
        """
        time.sleep(self._limits.launcher_grace)
        self._lose(self._peers[position], "ended", call)

    def _lose(self, peer: Peer, reason: str, call: object) -> NoReturn:
        self.lost_instance = peer.instance
        self.lost_error = InstanceLostError(
            f"{call}: {self._limits.names.of(peer.instance)} (process {peer.pid}) {reason}"
        )
        raise self.lost_error

    def _has_ended(self, pid: int) -> bool:
        """Tell whether a process has ended, even if it is still a zombie."""
        try:
            if pid not in self._pidfds:
                self._pidfds[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # without a pidfd, only the time-out detects a missing instance
            return False
        ended = select.poll()  # select() rejects descriptors above 1023
        ended.register(self._pidfds[pid], select.POLLIN)
        return bool(ended.poll(0))

    def leave(self, error: InstanceLostError) -> None:
        """Tell the other instances that this instance has left; later waits raise ``error``."""
        self.lost_error = error
        self._words[self._own_line + _LEFT] = 1

    def close(self) -> None:
        """Tell the other instances that this instance has left, and close their pidfds."""
        self._words[self._own_line + _LEFT] = 1
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
