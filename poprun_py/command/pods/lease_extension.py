"""Extension of all leases after the pod server could not run for a while.

A client renews its lease several times per lease duration. While the server is stopped or gets no
CPU time, renewals cannot arrive, and no lease may end for that reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from popdist_py.pods.pod_errors import PodError

# In parts of a lease. After a shorter pause, the remaining renewals suffice.
_LONGEST_PAUSE: Final = 1 / 3
_PERIOD: Final = 1 / 12


class LeaseExtender:
    """Notices that the server did not run for a while, and extends all leases then.

    Args:
        renew_all: Renews all leases for a number of seconds from now.
        seconds: The duration of a lease.
        now: Returns the time in seconds.
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
        """Note that the server runs now. Called periodically and before each request."""
        with self._lock:
            now = self._now()
            if now - self._last > self._seconds * _LONGEST_PAUSE:
                self._renew_all(self._seconds)
            self._last = now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call ``tick`` periodically in a thread during the block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._seconds * _PERIOD):
                # If the store has failed, the next request reports the error.
                with suppress(PodError):
                    self.tick()

        thread = threading.Thread(target=run, name="lease-extender", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
