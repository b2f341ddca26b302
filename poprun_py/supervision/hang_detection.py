"""When an instance counts as hung: pure, the clock is an argument.

Only instances that have begun to count steps are judged; a plain program that never does so is
left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from popdist_py.environment import COMPILING, INFERENCE, TRAINING
from poprun_py.supervision.job import Progress

__all__ = ["HangWatch"]

_AUTO_FACTOR, _AUTO_FLOOR_SECONDS, _AUTO_SAMPLES = 20, 10.0, 5
_KEPT_SAMPLES = 101
# Before its first step an instance joins the others, loads data and compiles; other models are
# compiled later.
_START_FACTOR, _START_FLOOR_SECONDS = 10, 30.0
# A launcher that has not looked for so long was stopped itself: what it missed is no silence.
_LATE_SECONDS = 1.0


class HangWatch:
    """Follows the steps of all instances.

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

    def ended(self, instance: int) -> None:
        """Judge this instance no more."""
        self._last.pop(instance, None)

    def next_deadline(self) -> float:
        """Return when the steps have to be looked at again."""
        return self._looked_at + self.sample_seconds

    def on_time(self, now: float, *, is_held_up: bool) -> tuple[int, ...]:
        """Return the instances that hang now, the one that is silent for longest first.

        Args:
            now: the time.
            is_held_up: whether the reader of the output makes the instances wait.
        """
        if is_held_up or now > self._looked_at + _LATE_SECONDS:
            self.excuse(now)
        self._looked_at = now
        return self.hung(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return the instances that have made no step for too long, the longest first.

        One that waits for another, or for a core, may be over the limit in the same look.
        """
        silent = [
            (when, instance)
            for instance, (progress, when) in self._last.items()
            if now - when > self._patience(progress)
        ]
        return tuple(instance for _, instance in sorted(silent))

    def _patience(self, progress: Progress) -> float:
        """Return how long an instance may be silent there; inf while nothing can be compared."""
        is_compiling = progress.kind == COMPILING
        limit = self.limit(TRAINING if is_compiling else progress.kind)
        if limit is None:
            return float("inf")
        if is_compiling or not progress.has_begun:
            return max(_START_FLOOR_SECONDS, _START_FACTOR * limit)
        return limit

    def done(self) -> dict[int, tuple[int, int]]:
        """Return the training steps, and other calls since, of every instance that is judged."""
        return {i: (progress.step, progress.calls) for i, (progress, _) in self._last.items()}

    def silence(self, instance: int, now: float) -> float:
        """Return the seconds since an instance's last step."""
        return now - self._last[instance][1]


def _median(values: Iterable[float]) -> float:
    """Return the upper median; importing the statistics module would delay the launch."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
