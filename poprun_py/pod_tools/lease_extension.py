"""The time of renewals counts only while the server runs: a pause gives it back.

Nothing here frees an attachment: the store does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from popdist_py.pods.errors import PodError

# A lease is renewed six times; what is lost by a shorter pause than this is made up for.
_LONGEST_PAUSE: Final = 1 / 3
_PERIOD: Final = 1 / 12


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
        """Say that the server runs: again and again, and before a request is served."""
        with self._lock:
            now = self._now()
            if now - self._last > self._seconds * _LONGEST_PAUSE:
                self._renew_all(self._seconds)
            # Also when that fails: the store says so to whoever asks it next.
            self._last = now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tick in a thread of its own during the block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._seconds * _PERIOD):
                with suppress(PodError):
                    self.tick()

        thread = threading.Thread(target=run, name="lease-clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
