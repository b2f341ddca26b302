"""The time of renewals counts only while the server runs: a pause gives it back.

Nothing here frees an attachment: the store does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["LeaseClock"]


class LeaseClock:
    """Sees that the server stood still (stopped, or starved of time), and renews all leases then.

    Args:
        renew_all: gives all remote holders a number of seconds from now.
        seconds: how long a lease is.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        renew_all: Callable[[float], None],
        seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renew_all = renew_all
        self._seconds = seconds
        self._now = now
        self._lock = threading.Lock()
        self._last = now()

    def tick(self) -> None:
        """Say that the server runs: at least every second, and before a request is served."""
        with self._lock:
            now = self._now()
            if now - self._last > self._seconds / 3:
                self._renew_all(self._seconds)
            # Also when that fails: the store says so to whoever asks it next.
            self._last = now
