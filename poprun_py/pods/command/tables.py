"""Tables as V-IPU draws them, and facts as lines. Pure: cells in, text out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table without outer bars: its columns are as wide as their widest cell."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = "-" * (sum(widths) + 3 * len(widths) - 2)
    lines = [_line(columns, widths), rule, *(_line(row, widths) for row in cells)]
    return "\n".join([*lines, rule] if cells else lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f" {' | '.join(padded)}".rstrip()


def facts(title: str, values: Mapping[str, object]) -> str:
    """Return a title, and one line for each value."""
    lines = (f"  {name}: {printable(value)}".rstrip() for name, value in values.items())
    return "\n".join([f"{title}:", *lines])


def printable(value: object) -> str:
    """Return a text that neither breaks a line nor changes the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def local_time(seconds: float) -> str:
    """Return a time in seconds since the epoch as this machine's clock shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
