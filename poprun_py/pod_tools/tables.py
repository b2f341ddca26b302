"""Tables as V-IPU draws them, and facts as lines. Pure: cells in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from poprun_py.text_tables import aligned_rows
from poprun_py.texts import printable


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table without outer bars: its columns are as wide as their widest cell."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    lines = aligned_rows([columns, *cells], " | ")
    rule = "-" * (len(lines[0]) + 1)
    heading, *own = (f" {line}".rstrip() for line in lines)
    return "\n".join([heading, rule, *own, *([rule] if own else [])])


def facts(title: str, values: Mapping[str, object]) -> str:
    """Return a title, and one line for each value."""
    lines = (f"  {name}: {printable(str(value))}".rstrip() for name, value in values.items())
    return "\n".join([f"{title}:", *lines])
