"""Which instance is in the debugger, and who waits for a turn: pure."""

from __future__ import annotations

from collections import deque


class DebugTurns:
    """The debuggers of a job: one at a time has the keyboard, in the order in which they ask."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def current(self) -> int | None:
        """The instance that is in the debugger."""
        return self._waiting[0][0] if self._waiting else None

    def enter(self, instance: int, call: int) -> bool:
        """Note that an instance wants the debugger at a call; tells whether it gets it now."""
        self._waiting.append((instance, call))
        return len(self._waiting) == 1

    def leave(self, instance: int) -> int | None:
        """Forget an instance that has left its debugger, or has ended; returns its call if any."""
        calls = [call for each, call in self._waiting if each == instance]
        self._waiting = deque(turn for turn in self._waiting if turn[0] != instance)
        return max(calls) if calls else None
