"""When an instance counts as hung: pure, the clock is an argument.

Where instances count steps, they are judged by these, each for itself. A job in which none does is
judged as a whole, by what moves in its instances at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from popdist_py.environment import COMPILING, INFERENCE, TRAINING
from poprun_py.instance.observation import BUSY_SHARE
from poprun_py.supervision.job import Progress

__all__ = ["HangWatch", "LifeWatch", "Look"]

_AUTO_FACTOR, _AUTO_FLOOR_SECONDS, _AUTO_SAMPLES = 20, 10.0, 5
_KEPT_SAMPLES = 101
# Before its first step an instance joins the others, loads data and compiles; other models are
# compiled later.
_START_FACTOR, _START_FLOOR_SECONDS = 10, 30.0
# A launcher that has not looked for so long was stopped itself: what it missed is no silence.
_LATE_SECONDS = 1.0
# Of programs without steps nothing is known to compare with: a sleep of a minute is no hang.
_AUTO_LIFE_SECONDS = 120.0
_LEAST_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.1, 2.0
# More at once than a program uses that wakes up now and then. The kernel counts in 0.01 s.
_LEAST_CPU_SECONDS, _MOST_CPU_SECONDS = 0.02, 0.2
# Bytes that move while nothing goes on: of events between threads, and of stacks that we ask for.
_IDLE_BYTES_PER_SECOND, _IDLE_BYTES = 16 << 10, 256 << 10
# A wrapper that tells nothing for so long may have been stopped with its program.
_UNHEARD_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the wrapper of an instance that counts no steps saw at one time.

    ``at`` is in seconds on the clock of its host. By then the program had ``written`` bytes of
    output, been awake for ``awake_seconds``: with a CPU or in want of one, and moved so many
    ``moved_bytes`` of files, pipes and disk. ``call`` is the last
    collective of the library: its number, which one, whether it goes on. ``waits``: it waits for
    others in it. ``joined``: it has called ``init()``, and may count steps later. ``reads``: it
    waits for what the user types. Its main thread has run no Python for ``away`` seconds at least;
    0 if it has, or was not asked.
    """

    at: float
    written: int = 0
    awake_seconds: float = 0.0
    moved_bytes: int = 0
    call: tuple[int, int, int] = (0, 0, 0)
    waits: bool = False
    joined: bool = False
    reads: bool = False
    away: float = 0.0

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Look:
        """Return what a wrapper's message says."""
        number, which, goes_on, _ = message["call"]
        return cls(**{**message, "call": (number, which, goes_on)})


class HangWatch:
    """Follows the steps of all instances; ``life`` follows those of a job that counts none.

    Like is compared with like: training steps with training steps, other calls with other calls.
    Compiling is neither.

    Args:
        limit: seconds without a step, or "auto": 20 times the median step, at least 10 s. For the
            first step, and to compile, there is ten times as much, at least 30 s.
    """

    def __init__(self, limit: float | str) -> None:
        self._fixed = None if isinstance(limit, str) else limit
        # By instance: how far it is, and since when it is there.
        self._last: dict[int, tuple[Progress, float]] = {}
        self._durations: dict[int, deque[float]] = {
            kind: deque(maxlen=_KEPT_SAMPLES) for kind in (TRAINING, INFERENCE)
        }
        self._looked_at = float("-inf")
        self._may_hang_at = float("-inf")  # before that, no silence seen so far is too long
        self.life = LifeWatch(limit)

    @property
    def sample_seconds(self) -> float:
        """How often the steps have to be looked at."""
        return 0.2 if self._fixed is None else min(0.5, max(0.02, self._fixed / 5))

    def limit(self, kind: int = TRAINING) -> float | None:
        """Return the limit of a kind of call in seconds; None while "auto" has seen too few."""
        if self._fixed is not None:
            return self._fixed
        durations = self._durations[kind]
        if len(durations) < _AUTO_SAMPLES:
            return None
        return max(_AUTO_FLOOR_SECONDS, _AUTO_FACTOR * _median(durations))

    def beat(self, instance: int, progress: Progress, now: float) -> None:
        """Take how far an instance is."""
        before, when = self._last.get(instance, (progress, now))
        done = progress.calls_since(before)
        if done == 0:
            # It may have begun the call that is waited for: that is no progress.
            now = when
        elif done is not None and before.has_begun and progress.kind in self._durations:
            self._durations[progress.kind].append((now - when) / done)
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

    def on_time(self, now: float, *, is_held_up: bool) -> tuple[int, ...]:
        """Return the instances that hang now, the one that is silent for longest first.

        Args:
            now: the time.
            is_held_up: whether the reader of the output makes the instances wait.
        """
        # The launcher asks after every event: with thousands of instances, there are very many.
        is_early = now < min(self.next_deadline(), self._may_hang_at)
        if is_early and not is_held_up:
            return ()
        if is_held_up or now > self._looked_at + _LATE_SECONDS:
            self.excuse(now)
        self._looked_at = now
        return self.hung(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return the instances that have made no step for too long, the longest first.

        One that waits for another, or for a core, may be over the limit in the same look. Of a job
        without steps it is all of them, or none.
        """
        if not self.counts_steps:
            return self.life.hung(now)
        judged = [
            (when, instance, self._patience(progress))
            for instance, (progress, when) in self._last.items()
        ]
        self._may_hang_at = min(when + patience for when, _, patience in judged)
        silent = [each for each in judged if now - each[0] > each[2]]
        return tuple(instance for _, instance, _ in sorted(silent))

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
        if not self.counts_steps:
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
        self._cpu = _Bucket(BUSY_SHARE, min(_MOST_CPU_SECONDS, max(_LEAST_CPU_SECONDS, limit / 50)))
        self._bytes = _Bucket(_IDLE_BYTES_PER_SECOND, _IDLE_BYTES)

    def take(self, look: Look, now: float) -> None:
        """Compare with the look before."""
        before, self.last, self.heard = self.last, look, now
        if before is None:
            self.acted = self.moved = (look.at, now)
            return
        seconds = look.at - before.at
        has_bytes = self._bytes.runs_over(look.moved_bytes - before.moved_bytes, seconds)
        used = look.awake_seconds - before.awake_seconds
        # A collective of the library that waits does so in turns of sleep and of looking.
        is_busy = self._cpu.runs_over(0.0 if look.waits and before.waits else used, seconds)
        if (
            look.written != before.written
            or look.call != before.call
            or has_bytes
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
    """Follows what moves in the instances of a job that counts no steps.

    A job hangs when all its instances are silent. One is when, for the limit, it has written
    nothing, made no collective of the library, moved no bytes, and used no CPU time but for
    waiting. What it uses counts as waiting if the library says so; and if its main thread has run
    no Python all the time, and stands in a call that waits for others: only its stack tells that,
    and who asks for it reports back with ``computes``.

    Args:
        limit: seconds of silence, or "auto": two minutes. An instance that has joined the others,
            and made no collective, is given as long as for a first step.
    """

    def __init__(self, limit: float | str) -> None:
        self._limit = _AUTO_LIFE_SECONDS if isinstance(limit, str) else limit
        self._start = self._limit if isinstance(limit, str) else _start_patience(limit)
        self._watched: dict[int, _Watched] = {}

    @property
    def look_seconds(self) -> float:
        """How often the instances have to be looked at."""
        return min(_MOST_LOOK_SECONDS, max(_LEAST_LOOK_SECONDS, self._limit / 8))

    def started(self, instance: int, now: float) -> None:
        """Watch an instance whose program runs."""
        self._watched[instance] = _Watched(self._limit, now)

    def look(self, instance: int, look: Look, now: float) -> None:
        """Take a look at an instance."""
        if instance in self._watched:
            self._watched[instance].take(look, now)

    def excuse(self, now: float) -> None:
        """Begin all silences anew."""
        for instance in self._watched:
            self.computes(instance, now)

    def computes(self, instance: int, now: float) -> None:
        """Begin the silence of an instance anew: it computes, and has told nothing."""
        each = self._watched[instance]
        each.acted = each.moved = (each.last.at if each.last else 0.0, now)

    def ended(self, instance: int, now: float) -> None:
        """Judge this instance no more; the others go on from here."""
        self._watched.pop(instance, None)
        self.excuse(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return all instances if nothing moves, the one that is silent for longest first."""
        if not all(self._is_silent(each, now) or self._is_away(each, now) for each in self._all()):
            return ()
        return tuple(sorted(self._watched, key=lambda index: (-self.silence(index, now), index)))

    def busy(self, now: float) -> tuple[int, ...]:
        """Return those of the ``hung`` that use CPU time: their stacks tell whether for waiting."""
        return tuple(i for i, each in self._watched.items() if not self._is_silent(each, now))

    def silence(self, instance: int, now: float) -> float:
        """Return for how long an instance has done nothing, or no more than one call of C."""
        each = self._watched[instance]
        return each.seconds_since(each.acted, now)

    def done(self) -> dict[int, tuple[int, int]]:
        """Return the collectives that every instance has made or begun, and 0."""
        looks = {i: each.last for i, each in self._watched.items()}
        return {i: (look.call[0] if look else 0, 0) for i, look in looks.items()}

    def _all(self) -> list[_Watched]:
        return list(self._watched.values())

    def _is_silent(self, each: _Watched, now: float) -> bool:
        return each.seconds_since(each.moved, now) >= self._patience(each)

    def _is_away(self, each: _Watched, now: float) -> bool:
        """Tell whether it is in one call of C for all the time, and nothing else is seen of it."""
        patience = self._patience(each)
        is_away = each.last is not None and each.last.away >= patience / 2
        return is_away and each.seconds_since(each.acted, now) >= patience

    def _patience(self, each: _Watched) -> float:
        look = each.last
        has_begun = look is None or not look.joined or look.call[0] > 0
        return self._limit if has_begun else self._start


def _start_patience(limit: float) -> float:
    return max(_START_FLOOR_SECONDS, _START_FACTOR * limit)


def _median(values: Iterable[float]) -> float:
    """Return the upper median; importing the statistics module would delay the launch."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
