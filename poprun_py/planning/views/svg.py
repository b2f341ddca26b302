"""Blocks of SVG code for text, cells and frames, and arrangements of blocks in rows and columns.

The coordinates in a block start at the upper left corner of the block. The reader's typeface is not
known, so the width of a text is computed for a wide typeface.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from popdist_py.html_pages.page import showable
from poprun_py.planning.views.text_drawing import wrapped

_FONT = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
# The font size in pixels and the font weight of each kind of text.
_TEXTS = {
    "title": (17, 700),
    "name": (13, 600),
    "text": (12, 400),
    "note": (11, 400),
    "label": (10, 400),
}
# The widths of characters in a wide typeface (at least those of DejaVu Sans), relative to the font
# size.
_LETTERS = {
    " ,.;:-!'()[]/|ijlf": 0.42,
    "rt": 0.44,
    "acehknosuvxyz0123456789": 0.64,
    "bdgpq": 0.65,
    "#+<=>^~": 0.84,
    "mwMW@%": 1.0,
}
_WIDTHS = {letter: width for letters, width in _LETTERS.items() for letter in letters}
_NARROWEST = min(_LETTERS.values())
_CAPITAL, _OTHER, _BOLD = 0.79, 1.1, 1.12
_LINE = 1.35
# The distance from the vertical middle of a letter to the baseline, relative to the font size.
_BELOW_MIDDLE = 0.36
_RADIUS = 4
# The colours of texts and areas, then of lines, by class of the style sheet. The first colour is
# for light pages, and the second colour is for dark pages.
_FILLS = {
    "title": ("#0f172a", "#f1f5f9"),
    "name": ("#0f172a", "#f1f5f9"),
    "text": ("#334155", "#cbd5e1"),
    "note": ("#475569", "#a8b5c7"),
    "label": ("#0f172a", "#f8fafc"),
    "page": ("#f8fafc", "#0b1120"),
    "card": ("#ffffff", "#172033"),
    "node": ("#f1f5f9", "#0f172a"),
    "domain": ("none", "none"),
    "replica": ("none", "none"),
    "ipu": ("#ffffff", "#0f172a"),
    "alert": ("#fef3c7", "#422006"),
    "idle": ("#dbe1e9", "#3a475c"),
    "closed": ("none", "none"),
    "many": ("#94a3b8", "#64748b"),
    "own0": ("#a5c8fd", "#1d4ed8"),
    "own1": ("#fdc88a", "#b45309"),
    "own2": ("#9be8b4", "#15803d"),
    "own3": ("#f9b4d6", "#be185d"),
    "own4": ("#cfc2fc", "#6d28d9"),
    "own5": ("#f5e06a", "#856404"),
    "own6": ("#8ee3ef", "#0e7490"),
    "own7": ("#dcc9b6", "#78593b"),
}
_STROKES = {
    "card": ("#cbd5e1", "#475569"),
    "node": ("#e2e8f0", "#334155"),
    "domain": ("#94a3b8", "#64748b"),
    "replica": ("#94a3b8", "#64748b"),
    "ipu": ("#64748b", "#94a3b8"),
    "alert": ("#f59e0b", "#d97706"),
    "closed": ("#94a3b8", "#64748b"),
    "notch": ("#f1f5f9", "#0f172a"),
}
_DASHED = ("domain", "closed")


def _style() -> str:
    texts = (
        f".{kind}{{font:{weight} {size}px {_FONT}}}" for kind, (size, weight) in _TEXTS.items()
    )
    light, dark = (
        "".join(
            f".{kind}{{{attribute}:{shades[ground]}}}"
            for attribute, colours in (("fill", _FILLS), ("stroke", _STROKES))
            for kind, shades in colours.items()
        )
        for ground in (0, 1)
    )
    dashes = "".join(f".{kind}{{stroke-dasharray:3 2}}" for kind in _DASHED)
    middle = ".label{text-anchor:middle}"
    # Colours for dark pages are used on screens only, because paper is light.
    return (
        f"{''.join(texts)}{middle}{light}{dashes}"
        f"@media screen and (prefers-color-scheme:dark){{{dark}}}"
    )


# The style sheet (CSS) with the colours and fonts of all SVG pictures.
STYLE = _style()


@dataclass(frozen=True, slots=True)
class Block:
    """A part of an SVG picture, with its size in pixels and its SVG code."""

    width: int
    height: int
    body: str


def escaped(text: str) -> str:
    """Return ``text`` escaped for XML and HTML, with only ASCII characters."""
    shown = html.escape(showable(text))
    return shown.encode("ascii", "xmlcharrefreplace").decode()


# --- kinds of blocks ----------------------------------------------------------------------------


def paragraph(text: str, kind: str, width: int) -> Block:
    """Return an SVG block of text, with lines of at most ``width`` pixels."""
    size, _ = _TEXTS[kind]
    lines = [text]
    # The number of characters per line is first computed for the narrowest letters, then reduced
    # until every line fits into the width.
    columns = min(len(text), int(width / (size * _NARROWEST))) + 1
    while columns > 1 and _widest(lines, kind) > width:
        columns -= 1
        lines = _split(text, columns)
    step = math.ceil(size * _LINE)
    body = "".join(
        f'<text class="{kind}" y="{number * step + size}">{escaped(line)}</text>'
        for number, line in enumerate(lines)
    )
    return Block(_widest(lines, kind), step * len(lines), body)


def cell(label: str, *kinds: str, least: int = 17, height: int = 17, notches: int = 0) -> Block:
    """Return a box that is at least ``least`` pixels wide, with a label in the middle.

    ``kinds`` are classes of the style sheet. The box is divided from left to right into a part for
    each class. ``notches`` is the number of marks on the left edge and on the right edge of the
    box.
    """
    width = max(least, _text_width(label, "label") + 4)
    cuts = [width * number // max(1, len(kinds)) for number in range(len(kinds) + 1)]
    boxes = "".join(
        f'<rect class="{kind}"{_place(left)} width="{right - left}" height="{height}" rx="2"/>'
        for kind, left, right in zip(kinds, cuts, cuts[1:], strict=False)
    )
    marks = "".join(
        f'<path class="notch" d="M0 {y}h2M{width - 2} {y}h2"/>'
        for y in (height * n // (notches + 1) for n in range(1, notches + 1))
    )
    baseline = height / 2 + _TEXTS["label"][0] * _BELOW_MIDDLE
    text = f'<text class="label" x="{width / 2:g}" y="{baseline:g}">{escaped(label)}</text>'
    return Block(width, height, boxes + marks + (text if label else ""))


def framed(block: Block, kind: str, *, pad: int, width: int = 0) -> Block:
    """Return a frame around an SVG block, with ``pad`` pixels between the frame and the block.

    The returned frame is at least ``width`` pixels wide.
    """
    wide, high = max(width, block.width + 2 * pad), block.height + 2 * pad
    frame = f'<rect class="{kind}" width="{wide}" height="{high}" rx="{_RADIUS}"/>'
    return Block(wide, high, frame + _moved(block, pad, pad))


def described(block: Block, text: str) -> Block:
    """Return the SVG block ``block`` with a tooltip that contains ``text``."""
    return Block(block.width, block.height, f"<g><title>{escaped(text)}</title>{block.body}</g>")


# --- arrangements of blocks ---------------------------------------------------------------------


def flowing(blocks: Iterable[Block], width: float, *, gap: int) -> Block:
    """Arrange SVG blocks like the words of a text, in lines of at most ``width`` pixels."""
    body: list[str] = []
    x = y = widest = line_height = 0
    for block in blocks:
        if x and x + block.width > width:
            x, y, line_height = 0, y + line_height + gap, 0
        body.append(_moved(block, x, y))
        widest, line_height = max(widest, x + block.width), max(line_height, block.height)
        x += block.width + gap
    return Block(widest, y + line_height, "".join(body))


def stacked(blocks: Iterable[Block], *, gap: int) -> Block:
    """Arrange SVG blocks in a column, from top to bottom."""
    return flowing(blocks, 0, gap=gap)


def beside(blocks: Iterable[Block], *, gap: int) -> Block:
    """Arrange SVG blocks in a row, from left to right."""
    return flowing(blocks, math.inf, gap=gap)


def document(block: Block, *, title: str, description: str = "", style: str = "") -> str:
    """Return an SVG document with a title and a description, which screen readers read aloud."""
    desc = f"<desc>{escaped(description)}</desc>" if description else ""
    styled = f"<style>{style}</style>" if style else ""
    size = f'width="{block.width}" height="{block.height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {block.width} {block.height}" '
        f'{size} role="img"><title>{escaped(title)}</title>{desc}{styled}\n{block.body}\n</svg>'
    )


def _moved(block: Block, x: int, y: int) -> str:
    return f'\n<g transform="translate({x} {y})">{block.body}</g>' if x or y else block.body


def _place(x: int) -> str:
    return f' x="{x}"' if x else ""


def _split(text: str, columns: int) -> list[str]:
    return [piece for line in wrapped(text, columns) for piece in textwrap.wrap(line, columns)]


def _widest(lines: list[str], kind: str) -> int:
    return max((_text_width(line, kind) for line in lines), default=0)


def _text_width(text: str, kind: str) -> int:
    size, weight = _TEXTS[kind]
    letters = (_WIDTHS.get(letter, _CAPITAL if letter.isascii() else _OTHER) for letter in text)
    return math.ceil(sum(letters) * size * (_BOLD if weight > 400 else 1))
