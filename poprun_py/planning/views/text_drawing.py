"""Drawing with text on a terminal or in a file, with colours, trees and line breaks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# The colours of all text drawings, by their names in rich.
PALETTE = {"host": "bold", "node": "yellow", "instance": "green", "replica": "cyan"}
_CODES = {"bold": 1, "yellow": 33, "green": 32, "cyan": 36}
# The characters beyond ASCII that the lines of trees and tables need.
BOX_CHARACTERS = "└├│─┌┐┘┤┬┴┼"
# The beginnings of lines in a tree: before a child, before the last child, and below a child.
_BOX_LINES = ("├─ ", "└─ ", "│  ")
_ASCII_LINES = ("|- ", "`- ", "|  ")
_BLANK = "   "
# Lines are never broken to fewer columns than this, even if a deep tree exceeds the terminal.
_LEAST_TEXT = 12
# Lines are broken after a comma or semicolon, and only if that is not enough, at a blank.
_PHRASE = re.compile(r"[^,;]+[,;]*\s*|[,;]+\s*")
_WORD = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStyle:
    """The abilities of the terminal or file that a text is drawn for.

    Attributes:
        colour: Whether names have the colours of ``PALETTE``.
        box_lines: Whether lines are drawn with box-drawing characters instead of ASCII.
        width: The columns of the terminal; None for a file or a pipe, where no line is broken.
    """

    colour: bool = False
    box_lines: bool = True
    width: int | None = None

    def paint(self, text: str, kind: str) -> str:
        """Return ``text`` in the colour of a ``kind`` of ``PALETTE``."""
        return f"\x1b[{_CODES[PALETTE[kind]]}m{text}\x1b[0m" if self.colour else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A node of a tree, with its name in the colour of ``kind``, details, and child nodes."""

    kind: str
    name: str
    details: str = ""
    children: tuple[Branch, ...] = ()


def draw_tree(root: Branch, style: TextStyle) -> str:
    """Return a tree with one line for each branch, or several lines if the width is limited."""
    return "\n".join(_draw(root, style, "", ""))


def _draw(branch: Branch, style: TextStyle, start: str, indent: str) -> Iterator[str]:
    """Yield the lines of a branch. The first begins with ``start``, all others with ``indent``."""
    middle, last, below = _BOX_LINES if style.box_lines else _ASCII_LINES
    text = f"{branch.name}: {branch.details}" if branch.details else branch.name
    room = style.width - len(indent) - len(below) if style.width is not None else None
    unbroken = len(branch.name) + bool(branch.details)
    first, *more = wrapped(text, room, unbroken=unbroken)
    yield start + style.paint(branch.name, branch.kind) + first[len(branch.name) :]
    yield from (indent + (below if branch.children else _BLANK) + line for line in more)
    for number, child in enumerate(branch.children):
        is_last = number == len(branch.children) - 1
        yield from _draw(
            child,
            style,
            indent + (last if is_last else middle),
            indent + (_BLANK if is_last else below),
        )


def wrapped(text: str, width: int | None, *, unbroken: int = 0) -> list[str]:
    """Break a line after commas, and at blanks where necessary, into lines of limited width.

    The first ``unbroken`` characters stay together.
    """
    if width is None or len(text) <= width:
        return [text]
    limit = max(width, _LEAST_TEXT)
    lines = [text[:unbroken]]
    for phrase in _PHRASE.findall(text, unbroken):
        for piece in [phrase] if len(phrase.rstrip()) <= limit else _WORD.findall(phrase):
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > limit:
                lines.append("")
            lines[-1] += piece if lines[-1] else piece.lstrip()
    return [line.rstrip() for line in lines]
