"""Tables as lines of text, either plain or drawn by the package rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# A width in characters that is wider than any table, so that rich breaks no cell.
_ANY_WIDTH = 1 << 20
# The cells of values that are not known.
_NO_VALUE = ("", "-")
_COLOUR_CODES = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table that fits the terminal.

    Attributes:
        title: The heading of the column.
        cells: The text of the column's cell in each row.
        drop_order: On a narrow terminal the column with the lowest number is dropped first, but
            columns without any value before all others; a column with 0 is never dropped.
        is_text: Whether the cells contain text, which is aligned left; numbers are aligned right.
        breaks: Whether the text of a cell may continue on the next line.
        style: The colour of the cells, by rich's name.
    """

    title: str
    cells: tuple[str, ...]
    drop_order: int = 0
    is_text: bool = False
    breaks: bool = False
    style: str | None = None


def aligned_rows(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Return one line for each row, with every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]


def fitted_table(
    columns: Sequence[Column], *, width: int, row_styles: Sequence[str | None] = ()
) -> Table:
    """Return a rich table without the columns that do not fit the terminal.

    Args:
        columns: The columns from left to right.
        width: The width of the terminal, in characters.
        row_styles: The colour of each row; empty for rows without colours.
    """
    from rich import box
    from rich.table import Table

    shown = _fitting(columns, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for each in shown:
        table.add_column(
            each.title,
            justify="left" if each.is_text else "right",
            style=each.style,
            no_wrap=not each.breaks,
            overflow="fold" if each.breaks else "ellipsis",
        )
    rows = list(zip(*(each.cells for each in shown), strict=True))
    for row, style in zip(rows, row_styles or [None] * len(rows), strict=True):
        table.add_row(*row, style=style)
    return table


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    shown = list(columns)
    droppable = [each for each in columns if each.drop_order]
    for each in sorted(droppable, key=lambda c: (_has_values(c), c.drop_order)):
        if sum(_width(c) + 2 for c in shown) - 2 <= width:
            break
        shown.remove(each)
    return shown


def _has_values(column: Column) -> bool:
    return any(cell not in _NO_VALUE for cell in column.cells)


def _width(column: Column) -> int:
    return max(map(len, (column.title, *column.cells)))


def long_table_lines(
    columns: Sequence[Column], *, width: int, row_styles: Sequence[str | None], colour: bool = False
) -> list[str]:
    """Return the lines of a table with many rows, which looks as ``fitted_table`` does.

    For 500 rows, rich takes 0.5 s, and this function a few milliseconds. A cell is cut if the
    columns that are never dropped are wider than the terminal. The arguments are those of
    ``fitted_table`` and ``rich_lines``.
    """
    shown = _fitting(columns, width)
    widths = [_width(each) for each in shown]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(size) if column.is_text else cell.rjust(size)
            for column, cell, size in zip(shown, cells, widths, strict=True)
        )
        text = "  ".join(padded).rstrip()
        return text if len(text) <= width else text[: width - 1] + "…"

    def painted(text: str, style: str | None) -> str:
        return f"\x1b[{_COLOUR_CODES[style]}m{text}\x1b[0m" if colour and style else text

    rule = "─" * min(width, sum(widths) + 2 * (len(widths) - 1))
    rows = zip(*(each.cells for each in shown), strict=True)
    lines = [painted(line(row), style) for row, style in zip(rows, row_styles, strict=True)]
    return [line([each.title for each in shown]), rule, *lines]


def rich_lines(*parts: RenderableType, width: int | None = None, colour: bool = False) -> list[str]:
    """Draw tables and texts with rich, and return the lines without trailing blanks.

    Args:
        parts: The tables and texts. A text is shown literally, without markup.
        width: The width of the terminal, in characters; None to break no line.
        colour: Whether the lines contain terminal codes for colours.
    """
    from io import StringIO

    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=_ANY_WIDTH if width is None else width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]
