"""Coloured text, line breaks and trees of text, for a terminal or a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# The colour or style of the names of hosts, NUMA nodes, instances and replicas in texts.
PALETTE = {"host": "bold", "node": "yellow", "instance": "green", "replica": "cyan"}
_CODES = {"bold": 1, "yellow": 33, "green": 32, "cyan": 36}
# The box-drawing characters with which the lines of trees and tables are drawn.
BOX_CHARACTERS = "└├│─┌┐┘┤┬┴┼"
# The characters that begin a line of a tree: before a child node, before the last child node, and
# before each line below a child node that is not the last.
_BOX_LINES = ("├─ ", "└─ ", "│  ")
_ASCII_LINES = ("|- ", "`- ", "|  ")
_BLANK = "   "
# Lines of text have room for at least this many characters, even if a deep tree becomes wider than
# the terminal.
_LEAST_TEXT = 12
# Long lines are broken after a comma or semicolon. If the text up to the next comma does not fit on
# a line, the text is broken at a blank.
_PHRASE = re.compile(r"[^,;]+[,;]*\s*|[,;]+\s*")
_WORD = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStyle:
    """The colours, characters and width of a text drawing.

    Attributes:
        colour: Whether names of hosts and instances have the colours of ``PALETTE``.
        box_lines: Whether trees and tables are drawn with box-drawing characters, not ASCII.
        width: The number of columns of the terminal; None for a file or a pipe, in which lines are
            not broken.
    """

    colour: bool = False
    box_lines: bool = True
    width: int | None = None

    def paint(self, text: str, kind: str) -> str:
        """Return ``text`` in the colour of ``kind`` in ``PALETTE``."""
        return f"\x1b[{_CODES[PALETTE[kind]]}m{text}\x1b[0m" if self.colour else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A node of a tree, with a name, details and child nodes.

    The name of the node is drawn in the colour of ``kind`` in ``PALETTE``.
    """

    kind: str
    name: str
    details: str = ""
    children: tuple[Branch, ...] = ()


def draw_tree(root: Branch, style: TextStyle) -> str:
    """Return a tree as text, in which lines longer than ``style.width`` are broken."""
    return "\n".join(_draw(root, style, "", ""))


def _draw(branch: Branch, style: TextStyle, start: str, indent: str) -> Iterator[str]:
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
    """Break a text into lines of at most ``width`` characters, after commas or else at blanks.

    The first ``unbroken`` characters of the text stay on one line.
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
