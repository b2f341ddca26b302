"""Progress bars for a reader that is no terminal: whole lines now and then, in place of redrawing.

Bytes in, bytes out, the clock is an argument. What is not redrawn passes as it is.
"""

from __future__ import annotations

import re

# Often enough to see that a job goes on, seldom enough for the log of a day.
INTERVAL_SECONDS = 10.0
# A redrawn line that is longer than this is none of a progress bar: it is passed on.
_MOST_OF_LINE = 1 << 16
# Where a line ends or is begun anew: a carriage return alone, then also the cursor moved up, to a
# bar above another.
_MOVE = re.compile(rb"(\r+\n|\n|\r|\x1b\[A)")
_UP = b"\x1b[A"
_MOST_ROWS = 32


class ProgressLines:
    """One stream's progress bars as lines: the first state, one every ten seconds, and the last.

    A bar that begins within ten seconds after another is shown by its last state alone.
    """

    def __init__(self) -> None:
        self._carried = b""  # a carriage return that may be the first half of a line's end
        self._is_redrawn = False  # whether the line was begun anew
        self._has_text = False  # whether unfinished text has been passed on
        self._rows_below = 0  # by how many rows the cursor was moved up
        self._has_moved_down = False  # just now
        self._line = b""  # what is drawn of the line so far
        self._states: dict[int, bytes] = {}  # of each row, what was drawn in full last
        self._shown: dict[int, bytes] = {}
        self._shown_at = float("-inf")
        self._fed_at = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Return what is to be shown after more of the stream has come."""
        self._fed_at = now
        data = self._carried + data
        # Nearly always: no bar is drawn.
        if not self._is_redrawn and b"\r" not in data:
            self._carried = b""
            if data:
                self._has_text = not data.endswith(b"\n")
            return data
        self._carried = b"\r" if data.endswith(b"\r") else b""
        data = data.removesuffix(self._carried)
        shown = bytearray()
        pieces = _MOVE.split(data)
        for text, move in zip(pieces[::2], [*pieces[1::2], b""], strict=True):
            self._take(text, move, now, shown)
        return bytes(shown)

    def finish(self, now: float) -> bytes:
        """Return what is left of a stream that has ended; a bar ends with its last state."""
        shown = bytearray()
        if self._is_redrawn:
            self._end_bar(now, shown)
        return bytes(shown)

    def overdue(self, before: float) -> bytes:
        """Return what a bar shows that stands still since ``before`` and is due since then."""
        shown = bytearray()
        if self.due_at() <= before:
            self._drawn(before, shown)
        return bytes(shown)

    def due_at(self) -> float:
        """Return when a bar that stands still since it was fed is due; inf for never."""
        if not self._line.strip() and self._states == self._shown:
            return float("inf")
        return max(self._fed_at, self._shown_at + INTERVAL_SECONDS)

    @property
    def is_open(self) -> bool:
        """Whether a line is being redrawn."""
        return self._is_redrawn

    def _take(self, text: bytes, move: bytes, now: float, shown: bytearray) -> None:
        """Take some text and how the cursor moves after it."""
        if text and self._has_moved_down:
            # Ordinary text below the bars: they have ended.
            self._end_bar(now, shown)
        self._has_moved_down = False
        is_end = move.endswith(b"\n")
        if not self._is_redrawn and move != b"\r":
            self._pass(text + move, shown)
            return
        if not self._is_redrawn:
            self._is_redrawn = True
            if self._has_text:
                # What stood there first has been passed on: it is the bar's first state.
                self._pass(text + b"\n", shown)
                self._shown_at, text = now, b""
        self._line += text
        if is_end and not self._rows_below:
            self._end_bar(now, shown)
        elif move:
            self._drawn(now, shown)
            self._rows_below = min(self._rows_below + (move == _UP) - is_end, _MOST_ROWS)
            self._has_moved_down = is_end
        elif len(self._line) > _MOST_OF_LINE:
            line, self._line = self._line, b""
            self._end_bar(now, shown)
            self._pass(line, shown)

    def _pass(self, data: bytes, shown: bytearray) -> None:
        shown += data
        if data:
            self._has_text = not data.endswith(b"\n")

    def _drawn(self, now: float, shown: bytearray) -> None:
        """A state is complete: show it if it is time."""
        if self._line.strip():
            self._states[-self._rows_below] = self._line.rstrip()
        self._line = b""
        if now >= self._shown_at + INTERVAL_SECONDS:
            self._show(now, shown)

    def _show(self, now: float, shown: bytearray) -> None:
        """Show the state of every row that has changed, the upper ones first."""
        if self._states != self._shown:
            self._shown_at = now
            changed = sorted(self._states.items() - self._shown.items())
            shown += b"".join(state + b"\n" for _, state in changed)
            self._shown = dict(self._states)

    def _end_bar(self, now: float, shown: bytearray) -> None:
        """The line has ended: its last state counts, however soon it comes."""
        self._drawn(now, shown)
        self._show(now, shown)
        self._is_redrawn = self._has_text = self._has_moved_down = False
        self._rows_below = 0
        self._states, self._shown = {}, {}
