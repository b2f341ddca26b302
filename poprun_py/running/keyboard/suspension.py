"""Ctrl-Z: all programs are stopped, then the launcher itself; all go on together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

# A host that does not answer must not keep the user from the shell.
_ANSWER_SECONDS = 1.0


class Suspension:
    """The stop of one job: who has still to answer; the clock is an argument.

    Args:
        stop: called when all programs are stopped; returns when the launcher goes on.
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
        """The instances were asked to stop."""
        self._awaited = set(instances)
        self._stop_at = now + _ANSWER_SECONDS

    def stopped(self, instance: int) -> None:
        """An instance is stopped, or has ended."""
        self._awaited.discard(instance)

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        return self._stop_at if self._awaited else 0.0 if self.is_asked else float("inf")

    def on_time(self, now: float) -> None:
        """Stop the launcher if nobody has to answer any more."""
        if self.is_asked and (not self._awaited or now >= self._stop_at):
            self._stop_at = float("inf")
            self._stop()


def take_signal(number: int) -> None:
    """Do what a signal does to any program; returns when a process that it stopped goes on."""
    caught = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, caught)
