"""Handling of Ctrl-Z, which suspends all programs and then the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

# The launcher suspends itself after this many seconds even if a host does not answer, so that the
# user gets the shell prompt.
_ANSWER_SECONDS = 1.0


class Suspension:
    """Waits until the programs of a job are suspended, and then suspends the launcher.

    Args:
        stop: A function that suspends the launcher, and returns when the user continues the
            launcher.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._awaited: set[int] = set()
        self._stop_at = float("inf")

    @property
    def is_asked(self) -> bool:
        """Whether the launcher is waiting until the programs are suspended."""
        return self._stop_at != float("inf")

    def begin(self, instances: Iterable[int], now: float) -> None:
        """Start to wait for instances that were asked to suspend their programs."""
        self._awaited = set(instances)
        self._stop_at = now + _ANSWER_SECONDS

    def stopped(self, instance: int) -> None:
        """Handle the message that the program of an instance is suspended or has ended."""
        self._awaited.discard(instance)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        if self._awaited:
            return self._stop_at
        return 0.0 if self.is_asked else float("inf")

    def on_time(self, now: float) -> None:
        """Suspend the launcher, if all instances have answered or the time-out is over."""
        if self.is_asked and (not self._awaited or now >= self._stop_at):
            self._stop_at = float("inf")
            self._stop()


def take_signal(number: int) -> None:
    """Let a signal have its default effect on this process, such as suspending or ending it."""
    caught = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, caught)
