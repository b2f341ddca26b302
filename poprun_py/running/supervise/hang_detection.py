"""When an instance counts as hung: pure, the clock is an argument.

An instance that counts steps hangs if it makes no step and nothing else moves in it, unless it
waits for another instance that is at work. If no instance counts steps, the job is judged as a
whole, by what moves in its instances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from popdist_py.environment import COMPILING, INFERENCE, TRAINING
from poprun_py.instance.program_activity import BUSY_SHARE
from poprun_py.running.supervise.job import Progress

_AUTO_FACTOR, _AUTO_FLOOR_SECONDS, _AUTO_SAMPLES = 20, 10.0, 5
# The limit is at least this many times the longest time between two steps that was seen.
_AUTO_LONGEST_FACTOR = 2
_KEPT_SAMPLES = 101  # durations of single steps; several short steps share one beat
# A launcher that has not looked for this long was stopped itself: the missed time is not silence.
_LATE_SECONDS = 1.0
# A wrapper that sends neither steps nor looks for the limit, and this long at least, is stopped.
_LEAST_UNHEARD_SECONDS = 2.0
# Before its first step an instance joins the others, loads data and compiles; other models are
# compiled later.
_START_FACTOR, _START_FLOOR_SECONDS = 10, 30.0
# A disk, a file server, or an upload at the end of a program may stall for minutes.
_STORE_FACTOR, _STORE_FLOOR_SECONDS = 10, 300.0
# Of programs without steps nothing is known to compare with: a sleep of a minute is no hang.
_AUTO_LIFE_SECONDS = 120.0
_LEAST_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.1, 2.0
# More at once than a program uses that wakes up now and then. The kernel counts in 0.01 s.
_LEAST_CPU_SECONDS, _MOST_CPU_SECONDS = 0.02, 0.2
# Bytes that move while nothing goes on: of events between threads, and of stacks that we ask for.
_IDLE_BYTES_PER_SECOND, _IDLE_BYTES = 16 << 10, 256 << 10
# TCP bytes that are no sign of work: a program may send a monitor a few kilobytes now and then.
_IDLE_RECEIVED_PER_SECOND = 4 << 10
_LEAST_RECEIVED, _MOST_RECEIVED, _RECEIVED_PER_SECOND_OF_LIMIT = 4 << 10, 32 << 10, 1 << 10
# A wrapper that tells nothing for so long may have been stopped with its program.
_UNHEARD_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One observation of an instance that makes no steps, by its wrapper.

    ``at`` is in seconds on the clock of its host. By then the program had ``written`` bytes of
    output, been awake for ``awake_seconds``: with a CPU or in want of one, and moved so many
    ``moved_bytes`` of files, pipes and disk, and ``received_bytes`` of TCP. ``call`` is the last
    collective of the library: its number, which one, whether it goes on. ``waits``: the program
    waits for others in it. ``saves``: it saves or loads a checkpoint, or one of its threads waits
    for a disk. ``stopped``: a signal has stopped it. ``ending``: its interpreter is shutting down
    and runs no more Python. ``joined``: it has called ``init()``, and may count steps later.
    ``reads``: it waits for what the user types. ``away``: for at least so many seconds its main
    thread has run no Python; 0 if it has, or was not asked.
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
    def of(cls, message: Mapping[str, Any]) -> Look:
        """Return what a wrapper's message says."""
        number, which, goes_on, _ = message["call"]
        return cls(**{**message, "call": (number, which, goes_on)})


class HangWatch:
    """Follows the steps of all instances; ``life`` follows what else moves in them.

    An instance hangs if it has made no step for the limit and, as ``LifeWatch`` tells, nothing else
    has moved in it for as long. If it waits for others, it hangs only if none of these is at work.
    Like is compared with like: training steps with training steps, other calls with other calls.
    Compiling is neither. If a wrapper sends nothing, its instance is judged by its steps alone.

    Args:
        limit: Seconds without a step, or "auto": 20 times the median step or twice the longest
            time without a step, whichever is longer, and at least 10 s. The first step, and
            compiling, may take ten times as long, at least 30 s. With "auto", an instance is
            judged this early only if it is stopped, or waits in a collective of the library. Any
            other may sleep for two minutes.
    """

    def __init__(self, limit: float | str) -> None:
        self._fixed = None if isinstance(limit, str) else limit
        # By instance: how far it is, and since when it is there.
        self._last: dict[int, tuple[Progress, float]] = {}
        self._durations: dict[int, deque[float]] = {
            kind: deque(maxlen=_KEPT_SAMPLES) for kind in (TRAINING, INFERENCE)
        }
        self._longest = dict.fromkeys(self._durations, 0.0)
        self._limits: dict[int, float | None] = {}  # since the last beat
        self._looked_at = float("-inf")
        self._may_hang_at = float("-inf")  # no further instance exceeds its limit earlier
        self.life = LifeWatch(limit)

    @property
    def sample_seconds(self) -> float:
        """How often the steps have to be looked at."""
        return 0.2 if self._fixed is None else min(0.5, max(0.02, self._fixed / 5))

    def limit(self, kind: int = TRAINING) -> float | None:
        """Return the limit of a kind of call in seconds; None while "auto" has seen too few."""
        if self._fixed is not None:
            return self._fixed
        if kind not in self._limits:
            self._limits[kind] = self._auto_limit(kind)
        return self._limits[kind]

    def _auto_limit(self, kind: int) -> float | None:
        durations = self._durations[kind]
        if len(durations) < _AUTO_SAMPLES:
            return None
        longest = _AUTO_LONGEST_FACTOR * self._longest[kind]
        return max(_AUTO_FLOOR_SECONDS, _AUTO_FACTOR * _median(durations), longest)

    def beat(self, instance: int, progress: Progress, now: float) -> None:
        """Take how far an instance is."""
        before, when = self._last.get(instance, (progress, now))
        done = progress.calls_since(before)
        if done == 0:
            # It may have begun the call that is waited for: that is no progress.
            now = when
        else:
            self.life.computes(instance, now)
            if done is not None and before.has_begun and progress.kind in self._durations:
                several = [(now - when) / done] * min(done, _AUTO_SAMPLES)
                self._durations[progress.kind].extend(several)
                self._longest[progress.kind] = max(self._longest[progress.kind], now - when)
                self._limits.clear()
        self._last[instance] = (progress, now)

    def excuse(self, now: float) -> None:
        """Begin all silences anew: the launcher, or the reader of the output, made all wait."""
        self._last = {instance: (progress, now) for instance, (progress, _) in self._last.items()}
        self.life.excuse(now)

    def ended(self, instance: int, now: float) -> None:
        """Judge this instance no more."""
        self._last.pop(instance, None)
        self.life.ended(instance, now)

    @property
    def counts_steps(self) -> bool:
        """Whether an instance that runs counts steps: then only these are judged."""
        return bool(self._last)

    def next_deadline(self) -> float:
        """Return when the steps have to be looked at again."""
        return self._looked_at + self.sample_seconds

    def on_time(
        self, now: float, *, is_held_up: bool, is_mpirun_stopped: bool = False
    ) -> tuple[int, ...]:
        """Return the instances that hang now, the one that is silent for longest first.

        Args:
            now: The time.
            is_held_up: Whether the reader of the output makes the instances wait.
            is_mpirun_stopped: Whether mpirun is stopped: an ending instance then waits for ever.
        """
        self.life.may_end = not is_mpirun_stopped
        # The launcher asks after every event, and thousands of instances cause very many events.
        is_early = now < min(self.next_deadline(), self._may_hang_at)
        if is_early and not is_held_up:
            return ()
        if is_held_up or now > self._looked_at + _LATE_SECONDS:
            self.excuse(now)
        self._looked_at = now
        return self.hung(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return the instances that seem to hang, the one that is silent for longest first.

        The caller then asks for their stacks and calls ``judged``: an instance that only waits for
        another, or for a core, may exceed the limit at the same time. For a job without steps, the
        result is all instances or none.
        """
        ends = [(when, self._patience(progress)) for progress, when in self._last.values()]
        later = (when + patience for when, patience in ends if now - when <= patience)
        self._may_hang_at = min(later, default=float("inf"))
        if all(patience == float("inf") for _, patience in ends):
            return self.life.hung(now)
        still = [instance for instance in self._last if self._is_still(instance, now)]
        if all(map(self.life.waits, still)) and self._is_any_at_work(still, now):
            return ()
        return tuple(sorted(still, key=lambda index: (self._last[index][1], index)))

    def judged(self, waiting: Iterable[int], ending: Iterable[int], now: float) -> tuple[int, ...]:
        """Return the instances that hang; stacks have shown which are ``waiting`` or ``ending``."""
        waiting = set(waiting)
        for index in ending:
            self.life.ends(index, now)
        for index in self.busy(now):
            if index not in waiting:
                self.life.computes(index, now)
        hung = self.hung(now)
        is_each_waiting = all(index in waiting or self.life.waits(index) for index in hung)
        if self.counts_steps and is_each_waiting and self._is_any_at_work(hung, now):
            for index in hung:
                self.life.computes(index, now)
            return ()
        return hung

    def busy(self, now: float) -> tuple[int, ...]:
        """Return the ``hung`` instances that use CPU time; stacks tell whether only to wait."""
        hung = set(self.hung(now))
        return tuple(i for i in self.life.busy(now, self._quiet) if i in hung)

    def _is_still(self, index: int, now: float) -> bool:
        """Tell whether an instance has made no step for too long, and nothing else moves in it."""
        progress, when = self._last[index]
        patience = self._patience(progress)
        if now - when <= patience or self.life.is_ending(index, now):
            return False
        unheard = min(_UNHEARD_SECONDS, max(_LEAST_UNHEARD_SECONDS, patience))
        if not self.life.is_heard(index, now, unheard):
            return True
        return self.life.is_still(index, now, self._quiet(index))

    def _is_any_at_work(self, still: Iterable[int], now: float) -> bool:
        """Tell whether an instance outside ``still`` works, and may yet join the waiting ones."""
        still = set(still)
        return any(
            index not in still
            and not self.life.is_ending(index, now)
            and not (self._quiet(index) is None and self.life.is_still(index, now))
            for index in {*self.life.instances, *self._last}
        )

    def _quiet(self, index: int) -> float | None:
        """Return how long nothing may move in an instance; None if ``life`` decides that."""
        if index not in self._last:
            return None
        limit = self._patience(self._last[index][0])
        look = self.life.last(index)
        if limit == float("inf") or look is None:
            return None
        if look.saves:
            return _store_patience(limit)
        is_certain = self._fixed is not None or look.waits or look.stopped
        return limit if is_certain else max(_AUTO_LIFE_SECONDS, limit)

    def _patience(self, progress: Progress) -> float:
        """Return how long an instance may be silent there; inf while nothing can be compared."""
        is_compiling = progress.kind == COMPILING
        limit = self.limit(TRAINING if is_compiling else progress.kind)
        if limit is None:
            return float("inf")
        if is_compiling or not progress.has_begun:
            return _start_patience(limit)
        return limit

    def done(self) -> dict[int, tuple[int, int]]:
        """Return the training steps, and other calls since, of every instance that is judged."""
        if not self.counts_steps:
            return self.life.done()
        return {i: (progress.step, progress.calls) for i, (progress, _) in self._last.items()}

    def silence(self, instance: int, now: float) -> float:
        """Return the seconds since an instance's last step, or last sign of life."""
        if instance not in self._last:
            return self.life.silence(instance, now)
        return now - self._last[instance][1]


class _Bucket:
    """Fills with what is used beyond what a program uses that only waits."""

    def __init__(self, idle_per_second: float, size: float) -> None:
        self._idle, self._size = idle_per_second, size
        self._level = 0.0

    def runs_over(self, used: float, seconds: float) -> bool:
        """Take what was used in so many seconds; tell whether that is more than waiting."""
        self._level = max(0.0, self._level + used - self._idle * seconds)
        if self._level <= self._size:
            return False
        self._level = 0.0
        return True


class _Watched:
    """One instance: the last look at it, and when something moved, by two clocks.

    That of its host tells how long nothing moved; that of the launcher, since when that counts.
    """

    def __init__(self, limit: float, now: float) -> None:
        self.last: Look | None = None
        self.heard = now
        # When it last did more than to stay in a call of C, and when it used CPU time, or did more:
        # by the clock of its host, and the launcher's.
        self.acted = self.moved = (0.0, now)
        self.ending_since: float | None = None  # by the clock of the launcher
        self._cpu = _Bucket(BUSY_SHARE, min(_MOST_CPU_SECONDS, max(_LEAST_CPU_SECONDS, limit / 50)))
        self._bytes = _Bucket(_IDLE_BYTES_PER_SECOND, _IDLE_BYTES)
        received = min(_MOST_RECEIVED, max(_LEAST_RECEIVED, _RECEIVED_PER_SECOND_OF_LIMIT * limit))
        self._received = _Bucket(_IDLE_RECEIVED_PER_SECOND, received)

    def take(self, look: Look, now: float) -> None:
        """Compare with the look before."""
        before, self.last, self.heard = self.last, look, now
        if look.ending and self.ending_since is None:
            self.ending_since = now
        if before is None:
            self.acted = self.moved = (look.at, now)
            return
        seconds = look.at - before.at
        # A waiting collective of the library alternates between sleeping and polling. Work of other
        # threads and processes does not advance it, nor a program that is stopped.
        share = 0 if (look.waits and before.waits) or (look.stopped and before.stopped) else 1
        has_bytes = self._bytes.runs_over(share * (look.moved_bytes - before.moved_bytes), seconds)
        received = share * (look.received_bytes - before.received_bytes)
        has_received = self._received.runs_over(received, seconds)
        used = share * (look.awake_seconds - before.awake_seconds)
        is_busy = self._cpu.runs_over(used, seconds)
        if (
            look.written != before.written
            or look.call != before.call
            or (look.saves != before.saves and share)
            or has_bytes
            or has_received
            or look.reads
            or (is_busy and not look.away)
        ):
            self.acted = self.moved = (look.at, now)
        elif is_busy:
            self.moved = (look.at, now)

    def seconds_since(self, moment: tuple[float, float], now: float) -> float:
        """Return how long ago a moment was, as far as looks tell, which a busy host delays."""
        host, launcher = moment
        if self.last is None or now - self.heard > _UNHEARD_SECONDS:
            return now - launcher
        return min(self.last.at - host, now - launcher)


class LifeWatch:
    """Follows what moves in the instances; alone, it judges a job that counts no steps.

    Such a job hangs when all its instances are silent: if each, for the limit, has written
    nothing, made no collective of the library, moved no bytes, and used no CPU time but for
    waiting. CPU time counts as waiting if the library says so. It also does if the main thread has
    run no Python all the time and is in a call that waits for others. Only the stack tells that: a
    caller that asks for it, and sees no such call, calls ``computes``. An instance that saves or
    ends is given ten times the limit, at least five minutes; with "auto", five minutes. An ending
    instance is left out when the others are judged.

    Args:
        limit: Seconds of silence, or "auto": two minutes. An instance that has joined the others,
            and made no collective, is given as long as for a first step.
    """

    def __init__(self, limit: float | str) -> None:
        self._limit = _AUTO_LIFE_SECONDS if isinstance(limit, str) else limit
        self._start = self._limit if isinstance(limit, str) else _start_patience(limit)
        self._store = _STORE_FLOOR_SECONDS if isinstance(limit, str) else _store_patience(limit)
        self._watched: dict[int, _Watched] = {}
        self.may_end = True  # whether an ending instance can end; not while mpirun is stopped

    @property
    def look_seconds(self) -> float:
        """How often the instances have to be looked at."""
        return min(_MOST_LOOK_SECONDS, max(_LEAST_LOOK_SECONDS, self._limit / 8))

    @property
    def instances(self) -> Collection[int]:
        """The instances that run."""
        return self._watched.keys()

    def started(self, instance: int, now: float) -> None:
        """Watch an instance whose program runs."""
        self._watched[instance] = _Watched(self._limit, now)

    def look(self, instance: int, look: Look, now: float) -> None:
        """Take a look at an instance."""
        if instance in self._watched:
            self._watched[instance].take(look, now)

    def excuse(self, now: float) -> None:
        """Begin all silences anew."""
        for instance, each in self._watched.items():
            self.computes(instance, now)
            if each.ending_since is not None:
                each.ending_since = now

    def computes(self, instance: int, now: float) -> None:
        """Begin the silence of an instance anew: it computes, although its looks do not show it."""
        if each := self._watched.get(instance):
            each.acted = each.moved = (each.last.at if each.last else 0.0, now)

    def ends(self, instance: int, now: float) -> None:
        """Note that the interpreter of an instance is shutting down."""
        each = self._watched.get(instance)
        if each is not None and each.ending_since is None:
            each.ending_since = now

    def ended(self, instance: int, now: float) -> None:
        """Judge this instance no more; the others go on from here."""
        self._watched.pop(instance, None)
        self.excuse(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return all instances if nothing moves, the one that is silent for longest first."""
        judged = [index for index in self._watched if not self.is_ending(index, now)]
        if not all(self.is_still(index, now) for index in judged):
            return ()
        return tuple(sorted(judged, key=lambda index: (-self.silence(index, now), index)))

    def busy(
        self, now: float, patience: Callable[[int], float | None] = lambda _: None
    ) -> tuple[int, ...]:
        """Return the ``hung`` instances that use CPU time; stacks tell whether only to wait."""
        return tuple(
            index
            for index, each in self._watched.items()
            if each.seconds_since(each.moved, now) < self._patience(each, patience(index))
        )

    def last(self, instance: int) -> Look | None:
        """Return the last look at an instance, if there was one."""
        each = self._watched.get(instance)
        return each.last if each else None

    def waits(self, instance: int) -> bool:
        """Tell whether an instance waits for others in a collective of the library."""
        look = self.last(instance)
        return look is not None and look.waits

    def is_heard(self, instance: int, now: float, seconds: float) -> bool:
        """Tell whether a look at an instance has arrived in the last ``seconds``."""
        return self.last(instance) is not None and now - self._watched[instance].heard <= seconds

    def is_ending(self, instance: int, now: float) -> bool:
        """Tell whether the program of an instance is ending and still has time for it."""
        each = self._watched.get(instance)
        if each is None or each.ending_since is None or not self.may_end:
            return False
        is_stopped = each.last is not None and each.last.stopped
        return not is_stopped and now - each.ending_since < self._store

    def is_still(self, instance: int, now: float, patience: float | None = None) -> bool:
        """Tell whether an instance is silent, or has only been in one call of C all the time."""
        each = self._watched.get(instance)
        if each is None:
            return False
        patience = self._patience(each, patience)
        is_away = each.last is not None and each.last.away >= patience / 2
        if is_away and each.seconds_since(each.acted, now) >= patience:
            return True
        return each.seconds_since(each.moved, now) >= patience

    def silence(self, instance: int, now: float) -> float:
        """Return for how long an instance has done nothing, or no more than one call of C."""
        each = self._watched[instance]
        return each.seconds_since(each.acted, now)

    def done(self) -> dict[int, tuple[int, int]]:
        """Return the collectives that every instance has made or begun, and 0."""
        looks = {i: each.last for i, each in self._watched.items()}
        return {i: (look.call[0] if look else 0, 0) for i, look in looks.items()}

    def _patience(self, each: _Watched, given: float | None) -> float:
        if given is not None:
            return given
        look = each.last
        if look is not None and look.saves:
            return self._store
        has_begun = look is None or not look.joined or look.call[0] > 0
        return self._limit if has_begun else self._start


def _start_patience(limit: float) -> float:
    return max(_START_FLOOR_SECONDS, _START_FACTOR * limit)


def _store_patience(limit: float) -> float:
    """Return for how long nothing may move in a program that saves or ends."""
    return max(_STORE_FLOOR_SECONDS, _STORE_FACTOR * limit)


def _median(values: Iterable[float]) -> float:
    """Return the upper median; importing the statistics module would delay the launch."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
