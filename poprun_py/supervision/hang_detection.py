"""When an instance counts as hung: pure, the clock is an argument.

Only instances that have begun to count steps are judged; a plain program that never does so is
left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["HangWatch"]

_AUTO_FACTOR, _AUTO_FLOOR_SECONDS, _AUTO_SAMPLES = 20, 10.0, 5
_KEPT_SAMPLES = 101
# Before its first step an instance joins the others, loads data and compiles.
_START_FACTOR, _START_FLOOR_SECONDS = 10, 30.0
# A launcher that has not looked for so long was stopped itself: what it missed is no silence.
_LATE_SECONDS = 1.0


class HangWatch:
    """Follows the steps of all instances.

    Args:
        limit: seconds without a step, or "auto": 20 times the median step, at least 10 s. For the
            first step there is ten times as much, at least 30 s.
    """

    def __init__(self, limit: float | str) -> None:
        self._fixed = None if isinstance(limit, str) else limit
        self._last: dict[int, tuple[int, float]] = {}
        self._durations: deque[float] = deque(maxlen=_KEPT_SAMPLES)
        self._looked_at = float("-inf")

    @property
    def sample_seconds(self) -> float:
        """How often the steps have to be looked at."""
        return 0.2 if self._fixed is None else min(0.5, max(0.02, self._fixed / 5))

    @property
    def limit(self) -> float | None:
        """The limit in seconds; None while "auto" has seen too few steps."""
        if self._fixed is not None:
            return self._fixed
        if len(self._durations) < _AUTO_SAMPLES:
            return None
        return max(_AUTO_FLOOR_SECONDS, _AUTO_FACTOR * _median(self._durations))

    def beat(self, instance: int, step: int, now: float) -> None:
        """Take the number of steps that an instance has done."""
        if instance in self._last:
            before, when = self._last[instance]
            if before and step > before:
                self._durations.append((now - when) / (step - before))
        self._last[instance] = (step, now)

    def excuse(self, now: float) -> None:
        """Begin all silences anew: the launcher, or the reader of the output, made all wait."""
        self._last = {instance: (step, now) for instance, (step, _) in self._last.items()}

    def ended(self, instance: int) -> None:
        """Judge this instance no more."""
        self._last.pop(instance, None)

    def next_deadline(self) -> float:
        """Return when the steps have to be looked at again."""
        return self._looked_at + self.sample_seconds

    def on_time(self, now: float, *, is_held_up: bool) -> tuple[int, ...]:
        """Return the instances that hang now.

        Args:
            now: the time.
            is_held_up: whether the reader of the output makes the instances wait.
        """
        if is_held_up or now > self._looked_at + _LATE_SECONDS:
            self.excuse(now)
        self._looked_at = now
        return self.hung(now)

    def hung(self, now: float) -> tuple[int, ...]:
        """Return the instances that have made no step for too long."""
        limit = self.limit
        if limit is None:
            return ()
        at_start = max(_START_FLOOR_SECONDS, _START_FACTOR * limit)
        return tuple(
            instance
            for instance, (step, when) in sorted(self._last.items())
            if now - when > (limit if step else at_start)
        )

    def steps(self) -> dict[int, int]:
        """Return the number of steps of every instance that is judged."""
        return {instance: step for instance, (step, _) in self._last.items()}

    def silence(self, instance: int, now: float) -> float:
        """Return the seconds since an instance's last step."""
        return now - self._last[instance][1]


def _median(values: Iterable[float]) -> float:
    """Return the upper median; importing the statistics module would delay the launch."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
