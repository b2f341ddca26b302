"""Ctrl-Z, which stops all programs and then the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

# The launcher stops after this time even if a host does not answer, so the user gets the shell.
_ANSWER_SECONDS = 1.0


class Suspension:
    """Waits until the programs of a job have stopped, and then stops the launcher.

    Args:
        stop: Stops the launcher, and returns when the user continues it.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._awaited: set[int] = set()
        self._stop_at = float("inf")

    @property
    def is_asked(self) -> bool:
        """Whether the programs are being stopped."""
        return self._stop_at != float("inf")

    def begin(self, instances: Iterable[int], now: float) -> None:
        """Wait for these instances, which were asked to stop."""
        self._awaited = set(instances)
        self._stop_at = now + _ANSWER_SECONDS

    def stopped(self, instance: int) -> None:
        """Note that an instance has stopped or ended."""
        self._awaited.discard(instance)

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        if self._awaited:
            return self._stop_at
        return 0.0 if self.is_asked else float("inf")

    def on_time(self, now: float) -> None:
        """Stop the launcher after the last answer or the time-out."""
        if self.is_asked and (not self._awaited or now >= self._stop_at):
            self._stop_at = float("inf")
            self._stop()


def take_signal(number: int) -> None:
    """Let a signal have its default effect on this process, such as stopping it."""
    caught = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, caught)
