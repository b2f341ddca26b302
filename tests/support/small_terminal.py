"""What a terminal shows of a stream: the sequences that the launcher and rich write, no others."""

from __future__ import annotations

import re

__all__ = ["screen_of"]

_PIECE = re.compile(
    r"\x1b\[(?P<number>[?\d;]*)(?P<letter>[A-Za-z])|\x1b(?P<other>[78D])|(?P<char>.)", re.S
)


def screen_of(stream, *, columns, rows):
    """Return all lines, those that have scrolled away first, without empty ones at the end."""
    terminal = _Terminal(columns, rows)
    for piece in _PIECE.finditer(stream):
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

    def write(self, char):
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.down()
        elif char >= " ":
            if self.column == self.columns:
                self.column = 0
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
                del self.lines[self.row][self.column :]
                if letter == "J":
                    for row in range(self.row + 1, self.rows):
                        self.lines[row] = []
            case "m" | "h" | "l":
                pass
            case _:
                raise AssertionError(f"a sequence of no meaning here: {number}{letter}")

    def down(self):
        if self.row + 1 < self.rows:
            self.row += 1
        else:
            self.gone.append("".join(self.lines.pop(0)).rstrip())
            self.lines.append([])
