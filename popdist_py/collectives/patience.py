"""How long a wait for other instances has lasted; the clock is the only thing that it reads."""

from __future__ import annotations

import time

__all__ = ["Patience"]

# Waits look far more often: a process that did not look for so long was stopped (Ctrl-Z), and the
# others with it.
_STOPPED_SECONDS = 2.0


class Patience:
    """The time of one wait, without that in which this process was stopped."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def waited(self) -> float:
        """Return the seconds of the wait by now; to be asked again and again while it lasts."""
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        if passed < _STOPPED_SECONDS:
            self._seconds += passed
        return self._seconds
