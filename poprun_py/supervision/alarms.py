"""What happens at a time if nothing else did before."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Alarms"]


class Alarms:
    """Actions by name, each done once when its time has come."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Do ``action`` after some time, unless the alarm is set already."""
        self._set.setdefault(name, (time.monotonic() + seconds, action))

    def clear(self, name: str) -> None:
        """Forget an alarm."""
        self._set.pop(name, None)

    def ring(self, now: float) -> None:
        """Do what is due."""
        for name, (when, action) in list(self._set.items()):
            if now >= when and name in self._set:
                del self._set[name]
                action()

    def wait_limit(self, now: float) -> float:
        """Return the seconds until the next alarm."""
        return min((max(0.0, when - now) for when, _ in self._set.values()), default=float("inf"))
