"""How pictures are drawn for a reader: colours, lines, width; and the drawing of a tree.

Values in, text out: where the text goes, and so how it looks, is decided by who prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# What stands for what in every picture; the names are rich's too.
PALETTE = {"host": "bold", "node": "yellow", "instance": "green", "replica": "cyan"}
_CODES = {"bold": 1, "yellow": 33, "green": 32, "cyan": 36}
# All that a picture needs beyond ASCII: lines of a tree and of a table.
BOX_CHARACTERS = "└├│─┌┐┘┤┬┴┼"
_MIDDLE, _LAST, _RAIL, _NO_RAIL = "├─ ", "└─ ", "│  ", "   "
_ASCII_MIDDLE, _ASCII_LAST, _ASCII_RAIL = "|- ", "`- ", "|  "
# A tree deeper than the terminal is wide goes over its edge rather than into single letters.
_LEAST_TEXT = 12
# What stays together: the words up to a comma or semicolon. The CPUs of a node may be broken there.
_PHRASE = re.compile(r"[^,;]+[,;]*\s*|[,;]+\s*")
_WORD = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStyle:
    """How a picture is drawn.

    Attributes:
        colour: whether names have the colours of ``PALETTE``.
        box_lines: whether lines are box-drawing characters; else they are ASCII.
        width: columns of the terminal; None for a file or a pipe, where no line is broken.
    """

    colour: bool = False
    box_lines: bool = True
    width: int | None = None

    def paint(self, text: str, kind: str) -> str:
        """Return ``text`` in the colour of what it names."""
        return f"\x1b[{_CODES[PALETTE[kind]]}m{text}\x1b[0m" if self.colour else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A part of a tree: its name, coloured as ``kind``, what is known of it, and its own parts."""

    kind: str
    name: str
    details: str = ""
    children: tuple[Branch, ...] = ()


def draw_tree(root: Branch, look: TextStyle) -> str:
    """Return a tree, a line for each branch; where the width is limited, as many as it takes."""
    return "\n".join(_draw(root, look, "", ""))


def _draw(branch: Branch, look: TextStyle, start: str, indent: str) -> Iterator[str]:
    """Draw a branch whose first line begins with ``start``, and all others with ``indent``."""
    middle, last, rail = (
        (_MIDDLE, _LAST, _RAIL) if look.box_lines else (_ASCII_MIDDLE, _ASCII_LAST, _ASCII_RAIL)
    )
    text = f"{branch.name}: {branch.details}" if branch.details else branch.name
    room = look.width - len(indent) - len(rail) if look.width is not None else None
    unbroken = len(branch.name) + bool(branch.details)
    first, *more = wrapped(text, room, unbroken=unbroken)
    yield start + look.paint(branch.name, branch.kind) + first[len(branch.name) :]
    yield from (indent + (rail if branch.children else _NO_RAIL) + line for line in more)
    for number, child in enumerate(branch.children):
        is_last = number == len(branch.children) - 1
        yield from _draw(
            child,
            look,
            indent + (last if is_last else middle),
            indent + (_NO_RAIL if is_last else rail),
        )


def wrapped(text: str, width: int | None, *, unbroken: int = 0) -> list[str]:
    """Return ``text`` in lines of at most ``width`` columns, broken after commas, else at blanks.

    Args:
        text: one line.
        width: columns; None for no limit.
        unbroken: how many characters at the beginning stay in one line.
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
