"""Printable documents with a headline and tables, and their display as plain text and as HTML.

A cell of a table is a text, a share of a whole (such as 75 %), or a series of numbers. Plain text,
HTML and the terminal each draw percentages and series of numbers in their own way. The module
``document`` does not depend on what a document reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, zip_longest
from textwrap import wrap
from typing import Final, TypeAlias

__all__ = ["Cell", "Column", "Course", "Document", "Section", "Share", "html", "levels", "text"]

# The largest number of characters in a line of a report's plain text.
_WIDTH: Final = 100
_GAP: Final = "  "
_RAMP: Final = " .:-=+*#%@"
_COURSE_WIDTH: Final = 60
# Shares from this one on are displayed as multiples, because long percentages are hard to read.
_MANY: Final = 100


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a whole, which is displayed as a percentage, or as a multiple if it is very large.

    The number 1 stands for the whole. A share is larger than 1 if, for example, a model needs more
    memory than an IPU has.
    """

    value: float

    @property
    def is_multiple(self) -> bool:
        """Whether the share is displayed as a multiple of the whole, such as ``18,299 times``."""
        return self.value >= _MANY

    def __str__(self) -> str:
        return f"{self.value:,.0f} times" if self.is_multiple else f"{self.value:.1%}"


@dataclass(frozen=True, slots=True)
class Course:
    """A series of numbers from 0 to 1, which is drawn as a one-line chart in a table cell."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"|{''.join(_RAMP[level] for level in levels(self.values, len(_RAMP)))}|"


Cell: TypeAlias = str | Share | Course


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: The name of the column.
        is_words: Whether cells are aligned to the left, as words are.
        wraps: Whether a cell with too many words continues on the next line.
    """

    name: str
    is_words: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a printable report, with a title above the table and notes below the table."""

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A whole printable report, with a headline and tables.

    Attributes:
        headline: The line with the main result of the report.
        is_good: Whether the main result of the report is good news for the user. A terminal shows
            the headline in green for good news, and in red for bad news.
        sections: The tables and notes below the headline of the report.
    """

    headline: str
    is_good: bool
    sections: tuple[Section, ...]


def levels(values: Sequence[float], count: int) -> list[int]:
    """Return the heights of the bars of a one-line chart that draws a series of numbers.

    The chart of a series of numbers has at most 60 bars. Each bar of the chart shows the highest of
    the numbers that the bar stands for. The heights of bars are numbers from 0 to ``count - 1``,
    and ``count`` must be at least 3. A bar for the number 0 has the height 0, and a bar for a
    number of at least 1 has the height ``count - 1``.
    """
    parts = min(_COURSE_WIDTH, len(values))
    edges = [index * len(values) // parts for index in range(parts + 1)] if parts else []
    highest = [max(values[a:b]) for a, b in pairwise(edges)]
    return [_level(value, count - 1) for value in highest]


def _level(value: float, last: int) -> int:
    if value >= 1:
        return last
    return 0 if value <= 0 else min(last - 1, 1 + int(value * (last - 1)))


def text(document: Document) -> str:
    """Return a printable report as lines of at most 100 characters, without a final newline.

    If a table is too wide, dots replace the middle of long names. A line of the printed report is
    longer than 100 characters only if its table cannot be made narrower, or if a note contains a
    long word.
    """
    return "\n\n".join([document.headline, *map(_lines, document.sections)])


def _lines(section: Section) -> str:
    names = [column.name for column in section.columns]
    rows = [names, *([str(cell) for cell in row] for row in section.rows)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    words = [i for i, column in enumerate(section.columns) if column.is_words]
    over = sum(widths) + len(_GAP) * len(widths) - _WIDTH
    if words and over > 0:
        longest = max(words, key=lambda i: widths[i])
        widths[longest] = max(len(names[longest]), 12, widths[longest] - over)
    lines = [section.title]
    for row in rows if names else []:
        lines += _row_lines(row, widths, section.columns)
    for note in section.notes:
        for line in note.split("\n"):
            # Long words of a note below a table are not broken, so that the user can copy code from
            # the note.
            parts = wrap(_GAP + line, _WIDTH, subsequent_indent=2 * _GAP, break_long_words=False)
            lines += parts or [""]
    return "\n".join(lines)


def _row_lines(row: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table's row, of which there are several if a cell's words wrap."""
    cells = [
        wrap(cell, width) or [""] if column.wraps else [_shortened(cell, width)]
        for cell, width, column in zip(row, widths, columns, strict=True)
    ]
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = [
            part.ljust(width) if column.is_words else part.rjust(width)
            for part, width, column in zip(parts, widths, columns, strict=True)
        ]
        lines.append((_GAP + _GAP.join(aligned)).rstrip())
    return lines


def _shortened(name: str, width: int) -> str:
    """Return ``name``, with dots in place of its middle if it is longer than ``width``."""
    if len(name) <= width:
        return name
    end = (width - 3) * 2 // 3
    return f"{name[: width - 3 - end]}...{name[len(name) - end :]}"


def html(document: Document) -> str:
    """Return a report as HTML without colours and fonts, so that a notebook's style applies."""
    parts = [f"<p><strong>{escape(document.headline)}</strong></p>"]
    for section in document.sections:
        parts.append(f"<h4>{escape(section.title)}</h4>")
        if section.columns:
            aligned = ["left" if column.is_words else "right" for column in section.columns]
            rows = [_row("th", [column.name for column in section.columns], aligned)]
            rows += [_row("td", [str(cell) for cell in row], aligned) for row in section.rows]
            parts.append(f"<table>{''.join(rows)}</table>")
        parts += [f"<pre>{escape(note)}</pre>" for note in section.notes]
    return "\n".join(parts)


def _row(tag: str, cells: Sequence[str], aligned: Sequence[str]) -> str:
    made = (
        f'<{tag} style="text-align: {side}; white-space: pre">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, aligned, strict=True)
    )
    return f"<tr>{''.join(made)}</tr>"
