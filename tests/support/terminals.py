"""Terminals of tests: a user who types at one, the screen that a stream makes, and its colours.

A user waits for texts with a limit. The stream that appears holds all escape codes.
"""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import signal
import sys
import termios
import time

import pytest
from support.repository import ROOT

__all__ = ["LAUNCHER", "Typist", "colours_of", "plain_lines", "screen_of"]

_LIMIT_SECONDS = 40.0
LAUNCHER = [sys.executable, "-m", "poprun_py"]
# The sequences that the launcher and rich write, no others.
_PIECE = re.compile(
    r"\x1b\[(?P<number>[?\d;]*)(?P<letter>[A-Za-z])|\x1b(?P<other>[78D])|(?P<char>.)", re.S
)
_COLOUR = re.compile(r"\x1b\[(\d+)m")
_NAMES = {"1": "bold", "32": "green", "33": "yellow", "36": "cyan"}


class Typist:
    """A command in a terminal of its own, whose user this is.

    Args:
        command: what to start; it is the leader of the terminal's session.
        env: variables beside those of this process.
        cwd: the folder.
        size: rows and columns.
    """

    def __init__(self, command, *, env=None, cwd=None, size=(24, 80)):
        self.seen = ""
        self._code = None
        self._looked_from = 0
        start_read, start_write = os.pipe()
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.close(start_write)
            os.read(start_read, 1)  # until the terminal has its size
            if cwd is not None:
                os.chdir(cwd)
            variables = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1", **(env or {})}
            os.execvpe(str(command[0]), [str(w) for w in command], {**os.environ, **variables})
        os.close(start_read)
        self.resize(*size)
        self.first_modes = self.modes()
        os.close(start_write)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)

    def modes(self):
        """Return the modes of the terminal, flags and control characters."""
        return termios.tcgetattr(self.master)

    def echoes(self):
        return bool(self.modes()[3] & termios.ECHO)

    def is_canonical(self):
        return bool(self.modes()[3] & termios.ICANON)

    def resize(self, rows, columns):
        termios.tcsetwinsize(self.master, (rows, columns))

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self, seconds=0.05):
        """Take what appears within some time; False once nobody has the terminal open."""
        if select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:
                return False
            self.seen += data.decode(errors="replace")
        return True

    def expect(self, pattern, limit=_LIMIT_SECONDS):
        """Wait until the pattern appears after the last one; returns the match."""
        deadline = time.monotonic() + limit
        while not (match := re.compile(pattern, re.M | re.S).search(self.seen, self._looked_from)):
            if not self.read() or time.monotonic() > deadline:
                pytest.fail(f"{pattern!r} did not appear in {self.seen[self._looked_from :]!r}")
        self._looked_from = match.end()
        return match

    def wait_until(self, condition, limit=_LIMIT_SECONDS):
        """Wait for something that does not appear."""
        deadline = time.monotonic() + limit
        while not condition():
            self.read(0.01)
            if time.monotonic() > deadline:
                pytest.fail(f"it did not come true; there was {self.seen!r}")

    def ended(self, limit=_LIMIT_SECONDS):
        """Wait for the end of the command; returns its exit code, negative for a signal."""
        deadline = time.monotonic() + limit
        while self._code is None:
            self.read(0.01)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                pytest.fail(f"it did not end; there was {self.seen!r}")
        while select.select([self.master], [], [], 0)[0] and self.read():
            pass
        return self._code


def screen_of(stream, *, columns, rows, resizes=(), wraps_anew=True):
    """Return a terminal's lines after a stream: first those that have scrolled away.

    Args:
        resizes: pairs of a number of characters of the stream and the columns after those.
        wraps_anew: whether the terminal wraps its lines anew when it is resized, as most do, or
            cuts them, as xterm does.
    """
    terminal = _Terminal(columns, rows)
    starts = [0, *(start for start, _ in resizes), len(stream)]
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        if number:
            terminal.resize(resizes[number - 1][1], wraps_anew=wraps_anew)
        for piece in _PIECE.finditer(stream, start, end):
            if piece["char"] is not None:
                terminal.write(piece["char"])
            elif piece["other"] is not None:
                terminal.escape(piece["other"])
            else:
                terminal.control(piece["letter"], piece["number"])
    lines = [*terminal.gone, *("".join(line).rstrip() for line in terminal.lines)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


class _Terminal:
    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.gone = []
        self.lines = [[] for _ in range(rows)]
        self.row = self.column = 0
        self.saved = (0, 0)
        self.continued = set()  # rows whose line goes on in the next row; scrolling keeps it right

    def resize(self, columns, *, wraps_anew):
        """Give the terminal other columns; the cursor stays at its character."""
        if wraps_anew:
            self._wrap_anew(columns)
        else:
            self.lines = [line[:columns] for line in self.lines]
            self.continued.clear()
            self.column = min(self.column, columns - 1)
        self.columns = columns

    def _wrap_anew(self, columns):
        whole, cursor = [], (0, 0)
        for row, line in enumerate(self.lines):
            if row - 1 not in self.continued:
                whole.append([])
            if row == self.row:
                cursor = (len(whole) - 1, len(whole[-1]) + self.column)
            whole[-1] += line
        self.lines, self.continued = [], set()
        for number, line in enumerate(whole):
            start = len(self.lines)
            pieces = [line[n : n + columns] for n in range(0, len(line), columns)] or [[]]
            self.lines += pieces
            self.continued |= set(range(start, len(self.lines) - 1))
            if number == cursor[0]:
                below = min(cursor[1] // columns, len(pieces) - 1)
                self.row, self.column = start + below, min(cursor[1] - below * columns, columns)
        while len(self.lines) > self.rows and self.row < len(self.lines) - 1 and not self.lines[-1]:
            self.lines.pop()
        while len(self.lines) > self.rows:
            self._scroll()
        self.lines += [[] for _ in range(self.rows - len(self.lines))]

    def _scroll(self):
        self.gone.append("".join(self.lines.pop(0)).rstrip())
        self.continued = {row - 1 for row in self.continued if row}
        self.row = max(0, self.row - 1)

    def write(self, char):
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.down()
        elif char >= " ":
            if self.column == self.columns:
                self.column = 0
                self.continued.add(self.row)
                self.down()
            line = self.lines[self.row]
            line.extend(" " * (self.column + 1 - len(line)))
            line[self.column] = char
            self.column += 1

    def escape(self, letter):
        if letter == "7":
            self.saved = (self.row, self.column)
        elif letter == "8":
            self.row, self.column = self.saved
        else:
            self.down()

    def control(self, letter, number):
        count = int(number) if number.isdigit() else 1
        match letter:
            case "A":
                self.row = max(0, self.row - count)
            case "E":
                self.row = min(self.rows - 1, self.row + count)
                self.column = 0
            case "J" | "K":
                # In the last column, xterm erases the character that was written there.
                del self.lines[self.row][min(self.column, self.columns - 1) :]
                self.continued.discard(self.row)
                if letter == "J":
                    for row in range(self.row + 1, self.rows):
                        self.lines[row] = []
                    self.continued = {row for row in self.continued if row < self.row}
            case "m" | "h" | "l":
                pass
            case _:
                raise AssertionError(f"a sequence of no meaning here: {number}{letter}")

    def down(self):
        if self.row + 1 < self.rows:
            self.row += 1
        else:
            self._scroll()
            self.row = self.rows - 1
            self.lines.append([])


def plain_lines(text):
    """Return the lines of a text without its colours."""
    return _COLOUR.sub("", text).splitlines()


def colours_of(text):
    """Return the names of the colours in a text."""
    return {_NAMES[code] for code in _COLOUR.findall(text) if code != "0"}
