"""Tables of rich as lines of text: the one place that says how rich prints for the launcher.

rich is imported on use: a launch does not wait for it. Nothing here makes a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["rich_lines"]

# Wide enough for any table: a cell is never broken.
_ANY_WIDTH = 1 << 20


def rich_lines(*parts: RenderableType, width: int | None = None, colour: bool = False) -> list[str]:
    """Return what rich draws, line by line and without blanks at their ends.

    Args:
        parts: tables, texts; words are shown as they are, without markup.
        width: of the lines, in columns; None for as many as it takes.
        colour: whether styles become codes of a terminal.
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
