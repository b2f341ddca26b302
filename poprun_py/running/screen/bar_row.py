"""The text of a progress bar, fitted into one row of a terminal.

A progress bar is a line that a program writes again after each carriage return. Nothing here writes
to a terminal. The module is imported only when a program draws a progress bar on a terminal.
"""

from __future__ import annotations

import re

from poprun_py.display.terminal_rows import num_columns

_COLOUR = r"\x1b\[[\d;]*m"
_ERASE = r"\x1b\[[0-2]?K"
# Control characters and escape codes, except those that change only the row of the cursor.
_OTHER_CODES = re.compile(rb"[\x00-\x0c\x0e-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[\d;]*m|\[[0-2]?K)")
_TOKEN = re.compile(rf"({_COLOUR})|(.)", re.DOTALL)
_ERASED = re.compile(_ERASE)
# The meter of tqdm is the part between the vertical bars of `` 45%|####      | 45/100``.
_METER = re.compile(r"(?<=%\|)[^|]+(?=\|)")
# A text that shows progress, in contrast to the line that a user is typing.
_PROGRESS = re.compile(rb"\d ?%|\d+/\d+|\dit/s|\ds/it")


def stays_in_row(data: bytes) -> bool:
    """Return whether output only writes, colours and erases text in the row of the cursor."""
    return _OTHER_CODES.search(data) is None


def shows_progress(data: bytes) -> bool:
    """Return whether output looks like a progress bar, such as one with a percentage."""
    return _PROGRESS.search(data) is not None


def next_state(state: bytes, data: bytes) -> bytes:
    """Return the text of a progress bar after more output.

    The text ends with a carriage return if the next output overwrites the text from its beginning.
    """
    text = state + data
    states = [each for each in text.split(b"\r") if each]
    last = states[-1] if states else b""
    if len(states) > 1 and b"\x1b" not in states[-2] + last:
        # A shorter text leaves the end of the earlier text visible.
        before = states[-2].decode(errors="replace")
        now = last.decode(errors="replace")
        if len(now) < len(before):
            last = (now + before[len(now) :].rstrip()).encode()
    return last + (b"\r" if text.endswith(b"\r") else b"")


def last_states(lines: bytes, columns: int) -> bytes:
    """Return whole lines with only the last state of each progress bar, fitted into one row."""
    shown = []
    for line in lines.split(b"\n"):
        text = line.removesuffix(b"\r")
        if b"\r" in text and stays_in_row(text):
            end = line[len(text) :]
            shown.append(fitted(next_state(b"", text), columns, is_last=True) + end)
        else:
            shown.append(line)
    return b"\n".join(shown)


def fitted(state: bytes, columns: int, *, is_last: bool = False) -> bytes:
    """Return a progress bar's text for a row of ``columns`` columns.

    The meter of a bar like tqdm's is shortened. If this does not suffice, the end of the text is
    left out. The last state of a bar (``is_last``) keeps its end, because it stays on the terminal.
    """
    if len(state) <= columns and b"\x1b" not in state:
        return state.removesuffix(b"\r")
    text = _ERASED.sub("", state.decode(errors="replace")).replace("\r", "")
    excess = _width(text) - columns
    if excess > 0:
        shorter = _METER.sub(
            lambda meter: _resized(meter[0], len(meter[0]) - excess), text, count=1
        )
        if _width(shorter) <= columns:
            text = shorter
        elif not is_last:
            text = _cut(shorter, columns)
    return text.encode()


def _width(text: str) -> int:
    return num_columns(re.sub(_COLOUR, "", text))


def _resized(meter: str, columns: int) -> str:
    """Return a meter with another number of columns that shows the same progress."""
    return "".join(meter[n * len(meter) // columns] for n in range(columns))


def _cut(text: str, columns: int) -> str:
    kept, width = "", 0
    for token in _TOKEN.finditer(text):
        if token[2] is not None:
            width += num_columns(token[2])
        if width <= columns:
            kept += token[0]
        elif token[1] is not None:
            kept += token[1]  # a code after the last column may end a colour
    return kept
