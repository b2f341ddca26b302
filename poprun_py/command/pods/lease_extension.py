"""Extension of all leases after a time in which the pod server could not run.

A client renews its lease several times per lease duration. While the server is suspended or gets no
CPU time, it cannot receive renewals. No lease may end for that reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from popdist_py.pods.pod_errors import PodError

# Fractions of the lease duration: the longest pause of the server without extension, and the period
# of ``tick``. After a pause of less than a third, the client's later renewals arrive in time.
_LONGEST_PAUSE: Final = 1 / 3
_PERIOD: Final = 1 / 12


class LeaseExtender:
    """Extends all leases when the server has not run for a third of the lease duration.

    Args:
        renew_all: Renews all leases for the given number of seconds, counted from now.
        seconds: The duration of a lease in seconds.
        now: Returns the current time in seconds.
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
        """Record that the server runs now. If the server paused too long, extend all leases.

        The server calls this method periodically and before each request.
        """
        with self._lock:
            now = self._now()
            if now - self._last > self._seconds * _LONGEST_PAUSE:
                self._renew_all(self._seconds)
            self._last = now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call ``tick`` periodically in a background thread during the ``with`` block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._seconds * _PERIOD):
                # If the pod's storage has failed, the answer to the next request reports the error.
                with suppress(PodError):
                    self.tick()

        thread = threading.Thread(target=run, name="lease-extender", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
