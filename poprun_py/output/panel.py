"""Lines that stay below everything else on a terminal, such as the view of --live.

The cursor is always where the output goes on: the panel is drawn below it and the cursor put back,
so a line that is still open, a prompt and what is typed stay as they are. Whoever writes has the
panel erased first. Nothing here knows what the lines say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

__all__ = ["Panel", "Size"]

Size = tuple[int, int] | None

# Between two drawings while output comes.
_PAUSE_SECONDS = 0.1
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
# Down a row in the same column, which scrolls at the bottom; to the begin of the next row.
_DOWN, _NEXT_ROW = b"\x1bD", b"\x1b[1E"
_ERASE_FROM_HERE = b"\x1b[J"
# What is right of the cursor in its own row may be of a line that is written anew.
_ERASE_BELOW = _SAVE + _NEXT_ROW + _ERASE_FROM_HERE + _RESTORE


class Panel:
    """The lines below the output of one terminal.

    Args:
        write: writes to the terminal.
        size: returns the terminal's columns and rows now.
    """

    def __init__(self, write: Callable[[bytes], None], size: Callable[[], Size]) -> None:
        self._write = write
        self._size = size
        self._made_for: Size = None
        self._lines: list[bytes] = []
        self._is_drawn = False
        self._is_entered = False
        self._drawn_at = float("-inf")

    def write(self, data: bytes) -> None:
        """Write output; the panel comes back with ``on_time``, or now if it is long ago."""
        self.erase()
        self._write(data)
        self.on_time(time.monotonic())

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines until the terminal gets another size; none: no panel.

        They must be narrower than the terminal, and fewer than its rows.
        """
        self.erase()
        self._made_for = self._size()
        self._lines = [line.encode(errors="replace") for line in lines]
        self._draw(time.monotonic())

    def erase(self) -> None:
        """Take the panel off the terminal, for who writes to it by another way."""
        if self._is_drawn:
            self._write(_ERASE_FROM_HERE if self._is_entered else _ERASE_BELOW)
            self._is_drawn = self._is_entered = False

    def enter_typed(self) -> None:
        """The terminal has moved the cursor to the next row itself, which is the panel's."""
        self._is_entered = True

    def on_time(self, now: float) -> None:
        """Draw the panel again after output, not too often."""
        if now >= self.next_deadline():
            self._draw(now)

    def next_deadline(self) -> float:
        """Return when it is to be drawn again; inf for never."""
        if self._is_drawn or not self._lines:
            return float("inf")
        return self._drawn_at + _PAUSE_SECONDS

    def _draw(self, now: float) -> None:
        if self._size() != self._made_for:
            self._lines = []  # they would not fit: who makes them looks at the size again
        if not self._lines:
            return
        count = len(self._lines)
        room = _DOWN * count + b"\x1b[%dA" % count
        body = b"".join(_NEXT_ROW + line + b"\x1b[0m" for line in self._lines)
        self._write(room + _SAVE + body + _RESTORE)
        self._is_drawn, self._drawn_at = True, now
        self._is_entered = False
