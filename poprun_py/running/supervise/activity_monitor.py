"""Activity of instances between their steps, from samples that the wrappers send.

An instance is active if it writes output, uses CPU time, moves bytes, or calls a collective of the
library. A job whose instances do not count steps hangs when no instance is active. The classes of
this module do no I/O, and their methods take the current time as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from poprun_py.instance.program_activity import BUSY_SHARE

# The time limit without activity for programs that count no steps, with --hang-timeout auto. The
# step times of such programs are unknown, and a program may well sleep for a minute.
AUTO_IDLE_SECONDS = 120.0
# The time limit for a first step, or for compiling, is a multiple of the usual time limit, and at
# least this many seconds. Before its first step, an instance connects to the others, loads data and
# compiles.
_START_FACTOR, _START_FLOOR_SECONDS = 10, 30.0
# The time limit for a program that saves a checkpoint, loads a checkpoint or ends is a multiple of
# the usual time limit, and at least this many seconds. A disk, a file server, or an upload at the
# end of a program may stall for minutes.
_STORAGE_FACTOR, _STORAGE_FLOOR_SECONDS = 10, 300.0
_MIN_SAMPLE_SECONDS, _MAX_SAMPLE_SECONDS = 0.1, 2.0
# The least CPU time that counts as activity. A program that only waits, and wakes up now and then,
# uses less CPU time. The kernel counts CPU time in units of 0.01 s.
_MIN_CPU_SECONDS, _MAX_CPU_SECONDS = 0.02, 0.2
# An idle program reads and writes up to this many bytes for events between threads, and for stacks
# that the launcher requests.
_IDLE_BYTES_PER_SECOND, _IDLE_BYTES = 16 << 10, 256 << 10
# An idle program may receive this many bytes per second over TCP, such as from a monitoring
# service.
_IDLE_RECEIVED_PER_SECOND = 4 << 10
_MIN_RECEIVED, _MAX_RECEIVED, _RECEIVED_PER_SECOND_OF_LIMIT = 4 << 10, 32 << 10, 1 << 10
# A wrapper that sends no sample for this long may have been stopped together with its program.
_MAX_SAMPLE_AGE_SECONDS = 10.0


def start_limit(limit: float) -> float:
    """Return the time limit in seconds for a program's first step, and for compiling."""
    return max(_START_FLOOR_SECONDS, _START_FACTOR * limit)


def storage_limit(limit: float) -> float:
    """Return the limit in seconds without activity for a program that saves, loads or ends."""
    return max(_STORAGE_FLOOR_SECONDS, _STORAGE_FACTOR * limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivitySample:
    """The activity counters of an instance, which its wrapper samples between steps.

    The names of the attributes are the keys of the wrapper's message.

    Attributes:
        at: The time of the sample, in seconds on the clock of the instance's host.
        written: The number of bytes of output that the program has written so far.
        awake_seconds: The total time during which the program used a CPU or waited for a free CPU.
        moved_bytes: The number of bytes that the program has read and written so far, in files,
            pipes and disks.
        received_bytes: The number of bytes that the program has received over TCP so far.
        call: The number of the last collective of the library, its kind, and whether it is running.
        waits: Whether the program waits for other instances in its last collective.
        saves: Whether the program saves or loads a checkpoint, or one of its threads waits for a
            disk.
        stopped: Whether a signal has stopped the program.
        ending: Whether the program's interpreter is shutting down and runs no more Python.
        joined: Whether the program has called ``init()``, so that it may count steps later.
        reads: Whether the program waits for the user's input.
        away: The least number of seconds since the program's main thread last ran Python code; 0 if
            the thread has just run Python code, or if the wrapper did not check the thread.
    """

    at: float
    written: int = 0
    awake_seconds: float = 0.0
    moved_bytes: int = 0
    received_bytes: int = 0
    call: tuple[int, int, int] = (0, 0, 0)
    waits: bool = False
    saves: bool = False
    stopped: bool = False
    ending: bool = False
    joined: bool = False
    reads: bool = False
    away: float = 0.0

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> ActivitySample:
        """Return the activity sample that a wrapper's message contains."""
        number, kind, is_running, _ = message["call"]
        return cls(**{**message, "call": (number, kind, is_running)})


class _LeakyBucket:
    """Detects CPU time or bytes beyond those that a program uses while it only waits.

    A waiting program uses at most ``idle_per_second``. Any larger use is added up; the program is
    active while the sum is more than ``size``.
    """

    def __init__(self, idle_per_second: float, size: float) -> None:
        self._idle_per_second, self._size = idle_per_second, size
        self._level = 0.0

    def overflows(self, used: float, seconds: float) -> bool:
        """Add what was ``used`` in the last ``seconds``; tell whether that counts as activity."""
        self._level = max(0.0, self._level + used - self._idle_per_second * seconds)
        if self._level <= self._size:
            return False
        self._level = 0.0
        return True


class _Moment(NamedTuple):
    host: float  # the time in seconds on the clock of the instance's host
    launcher: float  # the same time on the launcher's clock


class InstanceActivity:
    """The last sample of one instance, and the times of its last activity.

    The idle time of an instance is measured on the clock of the instance's host. The idle time is
    never longer than on the launcher's clock.

    Args:
        limits: The time limits in seconds for an idle instance, for a first step, and for a program
            that saves, loads or ends.
        now: The time when the program started.
    """

    def __init__(self, limits: tuple[float, float, float], now: float) -> None:
        self.sample: ActivitySample | None = None
        self.ending_since: float | None = None  # on the launcher's clock
        self._limits = limits
        self._sampled_at = now
        # ``_activity`` is the time of the last activity. ``_action`` does not include activity that
        # is only CPU time in a C call.
        self._activity = self._action = _Moment(0.0, now)
        limit = limits[0]
        self._cpu = _LeakyBucket(
            BUSY_SHARE, min(_MAX_CPU_SECONDS, max(_MIN_CPU_SECONDS, limit / 50))
        )
        self._bytes = _LeakyBucket(_IDLE_BYTES_PER_SECOND, _IDLE_BYTES)
        received = min(_MAX_RECEIVED, max(_MIN_RECEIVED, _RECEIVED_PER_SECOND_OF_LIMIT * limit))
        self._received = _LeakyBucket(_IDLE_RECEIVED_PER_SECOND, received)

    def record(self, sample: ActivitySample, now: float) -> None:
        """Store a sample, and the time of any activity since the previous sample."""
        before, self.sample, self._sampled_at = self.sample, sample, now
        if sample.ending and self.ending_since is None:
            self.ending_since = now
        if before is None:
            self._action = self._activity = _Moment(sample.at, now)
            return
        seconds = sample.at - before.at
        # While a program waits in a collective of the library, the program sleeps and polls by
        # turns. Other threads and processes of the program may be active, but they do not help the
        # waiting collective or a stopped program.
        is_waiting = (sample.waits and before.waits) or (sample.stopped and before.stopped)
        share = 0 if is_waiting else 1
        moved = share * (sample.moved_bytes - before.moved_bytes)
        has_moved = self._bytes.overflows(moved, seconds)
        received = share * (sample.received_bytes - before.received_bytes)
        has_received = self._received.overflows(received, seconds)
        used = share * (sample.awake_seconds - before.awake_seconds)
        is_busy = self._cpu.overflows(used, seconds)
        if (
            sample.written != before.written
            or sample.call != before.call
            or (sample.saves != before.saves and not is_waiting)
            or has_moved
            or has_received
            or sample.reads
            or (is_busy and not sample.away)
        ):
            self._action = self._activity = _Moment(sample.at, now)
        elif is_busy:
            self._activity = _Moment(sample.at, now)

    @property
    def is_waiting(self) -> bool:
        """Whether the instance waits for others in a collective of the library."""
        return self.sample is not None and self.sample.waits

    def has_recent_sample(self, now: float, seconds: float) -> bool:
        """Tell whether a sample of the instance has arrived in the last ``seconds``."""
        return self.sample is not None and now - self._sampled_at <= seconds

    def mark_working(self, now: float) -> None:
        """Restart the idle time, because the instance works without visible activity."""
        host = self.sample.at if self.sample is not None else 0.0
        self._action = self._activity = _Moment(host, now)

    def mark_ending(self, now: float) -> None:
        """Record that the interpreter of the program is shutting down."""
        if self.ending_since is None:
            self.ending_since = now

    def is_active(self, now: float, limit: float | None = None) -> bool:
        """Tell whether the instance was active, such as by using CPU time, within the time limit.

        If ``limit`` is None, the last sample decides which time limit applies.
        """
        return self._seconds_since(self._activity, now) < self._limit(limit)

    def is_idle(self, now: float, limit: float | None = None) -> bool:
        """Tell whether the instance has been idle, or in one C call, for its whole time limit."""
        limit = self._limit(limit)
        is_in_c_call = self.sample is not None and self.sample.away >= limit / 2
        if is_in_c_call and self.idle_seconds(now) >= limit:
            return True
        return not self.is_active(now, limit)

    def idle_seconds(self, now: float) -> float:
        """Return for how many seconds the instance has been idle, or in one C call."""
        return self._seconds_since(self._action, now)

    def _seconds_since(self, moment: _Moment, now: float) -> float:
        """Return the seconds between ``moment`` and the last sample.

        A busy host delays samples, so the result can be shorter than the time on the launcher's
        clock.
        """
        if self.sample is None or now - self._sampled_at > _MAX_SAMPLE_AGE_SECONDS:
            return now - moment.launcher
        return min(self.sample.at - moment.host, now - moment.launcher)

    def _limit(self, given: float | None) -> float:
        if given is not None:
            return given
        usual, first_step, storage = self._limits
        sample = self.sample
        if sample is not None and sample.saves:
            return storage
        has_begun = sample is None or not sample.joined or sample.call[0] > 0
        return usual if has_begun else first_step


class ActivityMonitor:
    """Follows the activity of all instances, and detects the hang of a job that counts no steps.

    A job whose instances count no steps hangs when all its instances have been idle for the time
    limit. An instance is idle if it writes nothing, makes no collective of the library, moves no
    bytes, and uses CPU time only to wait. CPU time counts as waiting if the library reports that
    the instance waits. CPU time also counts as waiting if the program's main thread is in a long C
    call that waits for other instances. Only the stack of the thread shows whether a C call waits.
    If the C call does not wait, the caller of this class calls ``mark_working``. The time limit of
    an instance that saves a checkpoint or ends is ten times ``limit``, and at least five minutes.
    With "auto", this time limit is five minutes. The job may hang even if some instances are
    ending.

    Args:
        limit: The time limit in seconds without activity, or "auto" for two minutes. The time limit
            for a first step applies to an instance that has called ``init()`` but has not called a
            collective yet.
    """

    def __init__(self, limit: float | str) -> None:
        if isinstance(limit, str):
            self._limits = (AUTO_IDLE_SECONDS, AUTO_IDLE_SECONDS, _STORAGE_FLOOR_SECONDS)
        else:
            self._limits = (limit, start_limit(limit), storage_limit(limit))
        self._instances: dict[int, InstanceActivity] = {}
        # This attribute is False while mpirun is stopped, because a program cannot end while mpirun
        # is stopped.
        self.can_end = True

    @property
    def sample_interval(self) -> float:
        """The time between two samples of an instance, in seconds."""
        return min(_MAX_SAMPLE_SECONDS, max(_MIN_SAMPLE_SECONDS, self._limits[0] / 8))

    @property
    def instances(self) -> Collection[int]:
        """The running instances."""
        return self._instances.keys()

    def of(self, instance: int) -> InstanceActivity:
        """Return the activity of an instance; an instance that is not running is never idle."""
        each = self._instances.get(instance)
        return each if each is not None else InstanceActivity(self._limits, math.inf)

    def add(self, instance: int, now: float) -> None:
        """Begin to monitor an instance whose program has started."""
        self._instances[instance] = InstanceActivity(self._limits, now)

    def record(self, instance: int, sample: ActivitySample, now: float) -> None:
        """Record a sample of an instance."""
        self.of(instance).record(sample, now)

    def reset_timers(self, now: float) -> None:
        """Measure the idle times of all running instances from ``now`` on."""
        for each in self._instances.values():
            each.mark_working(now)
            if each.ending_since is not None:
                each.ending_since = now

    def remove(self, instance: int, now: float) -> None:
        """Remove an instance that has ended, and restart the idle times of all other instances."""
        self._instances.pop(instance, None)
        self.reset_timers(now)

    def is_ending(self, instance: int, now: float) -> bool:
        """Tell whether an instance is ending and has not reached the time limit for ending."""
        each = self.of(instance)
        if each.ending_since is None or not self.can_end:
            return False
        is_stopped = each.sample is not None and each.sample.stopped
        return not is_stopped and now - each.ending_since < self._limits[2]

    def hung(self, now: float) -> tuple[int, ...]:
        """Return all instances, the longest idle first, if all are idle; else an empty tuple."""
        judged = {i: each for i, each in self._instances.items() if not self.is_ending(i, now)}
        if not all(each.is_idle(now) for each in judged.values()):
            return ()
        return tuple(sorted(judged, key=lambda index: (-judged[index].idle_seconds(now), index)))

    def collective_counts(self) -> dict[int, tuple[int, int]]:
        """Return, for each instance, a pair of its number of begun collectives and 0."""
        samples = {index: each.sample for index, each in self._instances.items()}
        return {i: (sample.call[0] if sample else 0, 0) for i, sample in samples.items()}
