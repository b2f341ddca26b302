"""Conversion of progress bars to whole lines, if the output is not shown on a terminal."""

from __future__ import annotations

import re

# The seconds between two lines that show the same progress bar.
INTERVAL_SECONDS = 10.0
# If a redrawn line has more bytes than this, it is not a progress bar and is written unchanged.
_MOST_OF_LINE = 1 << 16
# The codes that end a line or a state of a progress bar: a newline, a carriage return without a
# newline, and the code that moves the cursor up to the progress bar above.
_MOVE = re.compile(rb"(\r+\n|\n|\r|\x1b\[A)")
UP = b"\x1b[A"
_MOST_ROWS = 32


class ProgressLines:
    """Turns the progress bars in one stream of output into whole lines.

    A progress bar becomes lines with its first state, a state every 10 s, and its last state. If a
    progress bar begins within 10 s after another bar, only the last state of the new bar is shown.

    Attributes:
        is_redrawn: Whether a carriage return has restarted the current line, as in a progress bar.
    """

    def __init__(self) -> None:
        self._out = bytearray()  # The output that the current call will return.
        self._carried = b""  # A carriage return after which a newline may arrive.
        self.is_redrawn = False
        self._has_text = False  # Whether the beginning of a line has been returned.
        self._rows_up = 0  # The rows by which the cursor has moved up.
        self._has_just_moved_down = False
        self._line = b""  # The beginning of a progress bar's current state.
        self._states: dict[int, bytes] = {}  # The last complete state of the bar in each row.
        self._shown: dict[int, bytes] = {}
        self._shown_at = float("-inf")
        self._fed_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Process more output of the stream, and return the bytes to show now."""
        self._fed_at = now
        data = self._carried + data
        # Output without progress bars, which is the usual case, is returned unchanged.
        if not self.is_redrawn and b"\r" not in data:
            self._carried = b""
            if data:
                self._has_text = not data.endswith(b"\n")
            return data
        self._carried = b"\r" if data.endswith(b"\r") else b""
        pieces = _MOVE.split(data.removesuffix(self._carried))
        for text, move in zip(pieces[::2], [*pieces[1::2], b""], strict=True):
            self._take(text, move, now)
        return self._taken()

    def finish(self, now: float) -> bytes:
        """Return the rest of a stream that has ended, such as the last state of a progress bar."""
        if self.is_redrawn:
            self._end_bar(now)
        return self._taken()

    def overdue(self, before: float) -> bytes:
        """Return the progress bar if it had to be shown at the time ``before`` or earlier."""
        if self.due_at() <= before:
            self._end_state(before)
        return self._taken()

    def due_at(self) -> float:
        """Return the time to show a progress bar's current state; inf if the state was shown."""
        if not self._line.strip() and self._states == self._shown:
            return float("inf")
        return max(self._fed_at, self._shown_at + INTERVAL_SECONDS)

    def _taken(self) -> bytes:
        taken = bytes(self._out)
        self._out.clear()
        return taken

    def _take(self, text: bytes, move: bytes, now: float) -> None:
        """Process ``text`` and the code ``move``, which moves the cursor after the text."""
        if text and self._has_just_moved_down:
            # Text below the progress bars means that the progress bars have ended.
            self._end_bar(now)
        self._has_just_moved_down = False
        is_end = move.endswith(b"\n")
        if not self.is_redrawn and move != b"\r":
            self._pass(text + move)
            return
        if not self.is_redrawn:
            self.is_redrawn = True
            if self._has_text:
                # The text of this line so far is the first state of the bar.
                self._pass(text + b"\n")
                self._shown_at, text = now, b""
        self._line += text
        if is_end and not self._rows_up:
            self._end_bar(now)
        elif move:
            self._end_state(now)
            self._rows_up = min(self._rows_up + (move == UP) - is_end, _MOST_ROWS)
            self._has_just_moved_down = is_end
        elif len(self._line) > _MOST_OF_LINE:
            line, self._line = self._line, b""
            self._end_bar(now)
            self._pass(line)

    def _pass(self, data: bytes) -> None:
        self._out += data
        if data:
            self._has_text = not data.endswith(b"\n")

    def _end_state(self, now: float) -> None:
        """Store a progress bar's state; show it if the last state was shown 10 s ago or earlier."""
        if self._line.strip():
            self._states[-self._rows_up] = self._line.rstrip()
        self._line = b""
        if now >= self._shown_at + INTERVAL_SECONDS:
            self._show(now)

    def _show(self, now: float) -> None:
        if self._states != self._shown:
            self._shown_at = now
            changed = sorted(self._states.items() - self._shown.items())
            self._out += b"".join(state + b"\n" for _, state in changed)
            self._shown = dict(self._states)

    def _end_bar(self, now: float) -> None:
        """Show the last state of all progress bars, without waiting for 10 s to pass."""
        self._end_state(now)
        self._show(now)
        self.is_redrawn = self._has_text = self._has_just_moved_down = False
        self._rows_up = 0
        self._states, self._shown = {}, {}
