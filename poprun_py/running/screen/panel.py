"""Lines that stay below everything else on a terminal, such as the view of --live.

The cursor always stays where the output continues. The panel is drawn below it, and the cursor is
put back, so an unfinished line, a prompt and typed text are not disturbed. Output is collected for
a moment. It is then written together with the codes that erase the panel and draw it again, so the
terminal never shows output without the panel. This module does not depend on the lines' content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Size = tuple[int, int] | None

# The pause between two drawings while output comes. More output than _MAX_HELD is written at once.
_PAUSE_SECONDS, _MAX_HELD = 0.1, 1 << 14
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
# Down a row in the same column, which scrolls at the bottom; to the begin of the next row.
_DOWN, _NEXT_ROW = b"\x1bD", b"\x1b[1E"
_ERASE_FROM_HERE = b"\x1b[J"


class Panel:
    """The lines below the output of one terminal.

    Args:
        write: writes to the terminal.
        size: returns the terminal's columns and rows now.
        is_ready: returns whether the terminal has taken all earlier output.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        size: Callable[[], Size],
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._write = write
        self._size = size
        self._is_ready = is_ready
        self._made_for: Size = None
        self._lines: list[bytes] = []
        self._held = bytearray()
        self._is_drawn = False
        self._is_entered = False  # whether the cursor is in the panel's first row
        self._drawn_at = float("-inf")

    def write(self, data: bytes) -> None:
        """Write output above the panel; if the panel was just drawn, leave it to ``on_time``."""
        self._held += data
        if not self._lines or len(self._held) > _MAX_HELD:
            self._write_frame(time.monotonic())
        else:
            self.on_time(time.monotonic())

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines until the terminal gets another size; none: no panel.

        They must be narrower than the terminal, and fewer than its rows.
        """
        self._made_for = self._size()
        self._lines = [line.encode(errors="replace") for line in lines]
        self._write_frame(time.monotonic())

    def erase(self) -> None:
        """Erase the panel and write the held output: other code is about to use the terminal."""
        if frame := self._erased() + self._taken():
            self._write(frame)

    def draw(self) -> None:
        """Draw the panel again after ``erase``."""
        self._write_frame(time.monotonic())

    def enter_typed(self) -> None:
        """The terminal has moved the cursor to the next row itself, which is the panel's."""
        self._is_entered = self._is_drawn

    def on_time(self, now: float) -> None:
        """Write the held output with the panel below it, if the pause between drawings is over."""
        if now >= self.next_deadline() and self._is_ready():
            self._write_frame(now)

    def next_deadline(self) -> float:
        """Return when to call ``on_time``; inf if there is nothing to write."""
        if self._is_entered:
            return float("-inf")  # draw at once: typed text would appear in the panel
        if not self._lines or (self._is_drawn and not self._held):
            return float("inf")
        return self._drawn_at + _PAUSE_SECONDS

    def _write_frame(self, now: float) -> None:
        """Erase the panel, write the held output and draw the panel, all in one piece."""
        if self._size() != self._made_for:
            self._lines = []  # they would not fit: who makes them looks at the size again
        frame = self._erased() + self._taken()
        if self._lines:
            frame += self._drawn()
            self._is_drawn, self._drawn_at = True, now
        if frame:
            self._write(frame)

    def _taken(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _erased(self) -> bytes:
        """Return the codes that erase the panel, if it is drawn, and keep the cursor in place."""
        if not self._is_drawn:
            return b""
        is_entered, self._is_entered, self._is_drawn = self._is_entered, False, False
        if is_entered:
            return _ERASE_FROM_HERE
        # Erase only from the next row on: text to the right of the cursor may belong to a line that
        # is being rewritten. Scroll first: if the window has been made lower, the cursor may be in
        # its last row.
        return _DOWN + _up(1) + _SAVE + _NEXT_ROW + _ERASE_FROM_HERE + _RESTORE

    def _drawn(self) -> bytes:
        count = len(self._lines)
        room = _DOWN * count + _up(count)
        body = b"".join(_NEXT_ROW + line + b"\x1b[0m" for line in self._lines)
        return room + _SAVE + body + _RESTORE


def _up(count: int) -> bytes:
    return b"\x1b[%dA" % count
