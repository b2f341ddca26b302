"""A panel: lines that stay below all other output on a terminal, such as the view of --live.

The cursor stays at the place where the output continues, so the panel does not disturb unfinished
lines, prompts and typed text. Output is held for at most 0.1 seconds, and then written together
with the codes that erase the panel and draw it again. The terminal therefore never shows output
without the panel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Size = tuple[int, int] | None

# The seconds between two drawings of the panel while output arrives. If more than _MAX_HELD bytes
# of output are held, the output is written immediately.
_PAUSE_SECONDS, _MAX_HELD = 0.1, 1 << 14
_SAVE, _RESTORE = b"\x1b7", b"\x1b8"
# The escape code _DOWN moves the cursor down one row in the same column, and scrolls at the bottom.
# The escape code _NEXT_ROW moves the cursor to the beginning of the next row.
_DOWN, _NEXT_ROW = b"\x1bD", b"\x1b[1E"
_ERASE_FROM_HERE = b"\x1b[J"


class Panel:
    """Lines below the output on one terminal.

    The function ``is_ready`` returns whether the terminal has taken all earlier output.
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
        self._size_of_lines: Size = None
        self._lines: list[bytes] = []
        self._held = bytearray()
        self._is_drawn = False
        self._is_entered = False  # whether the Enter key has moved the cursor into the panel
        self._drawn_at = float("-inf")

    def write(self, data: bytes) -> None:
        """Write output above the panel, or hold it if the panel was drawn less than 0.1 s ago."""
        self._held += data
        if not self._lines or len(self._held) > _MAX_HELD:
            self._write_frame(time.monotonic())
        else:
            self.on_time(time.monotonic())

    def show(self, lines: Sequence[str]) -> None:
        """Show ``lines`` as the panel until the terminal is resized; no lines remove the panel.

        The lines must be narrower than the terminal, which must have more rows than lines.
        """
        self._size_of_lines = self._size()
        self._lines = [line.encode(errors="replace") for line in lines]
        self._write_frame(time.monotonic())

    def erase(self) -> None:
        """Erase the panel and write the held output, before other code writes to the terminal."""
        if frame := self._erased() + self._taken():
            self._write(frame)

    def draw(self) -> None:
        """Draw the panel again after a call of ``erase``."""
        self._write_frame(time.monotonic())

    def enter_typed(self) -> None:
        """Handle the user's Enter key, which has moved the cursor into the panel's first row."""
        self._is_entered = self._is_drawn

    def on_time(self, now: float) -> None:
        """Write the held output and draw the panel, if 0.1 s have passed since the last drawing."""
        if now >= self.next_deadline() and self._is_ready():
            self._write_frame(now)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        if self._is_entered:
            return float("-inf")  # draw now, because typed text would appear in the panel
        if not self._lines or (self._is_drawn and not self._held):
            return float("inf")
        return self._drawn_at + _PAUSE_SECONDS

    def _write_frame(self, now: float) -> None:
        if self._size() != self._size_of_lines:
            self._lines = []  # the panel's lines may not fit into the resized terminal
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
        """Return the codes that erase a drawn panel without moving the cursor."""
        if not self._is_drawn:
            return b""
        is_entered, self._is_entered, self._is_drawn = self._is_entered, False, False
        if is_entered:
            return _ERASE_FROM_HERE
        # Erase the screen only below the row of the cursor, because text to the right of the cursor
        # may belong to a line that is being rewritten. Scroll the screen first, because the cursor
        # may be in the last row if the user has reduced the height of the window.
        return _DOWN + _up(1) + _SAVE + _NEXT_ROW + _ERASE_FROM_HERE + _RESTORE

    def _drawn(self) -> bytes:
        count = len(self._lines)
        room = _DOWN * count + _up(count)
        body = b"".join(_NEXT_ROW + line + b"\x1b[0m" for line in self._lines)
        return room + _SAVE + body + _RESTORE


def _up(count: int) -> bytes:
    return b"\x1b[%dA" % count
