"""Texts that several packages read or write: JSON from others, and tables of rich as lines."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

# Wide enough for any table: a cell is never broken.
_ANY_WIDTH = 1 << 20


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    A name that stands twice in one object is refused: people would read one of its values, and a
    program the other.

    Args:
        text: bytes are UTF-8.

    Raises:
        ValueError: the text is not JSON, nests too deeply, or repeats a name; one short line.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except UnicodeDecodeError as error:
        # The error's own repr has the whole text.
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r:.80} is given twice")
    return table


def rich_lines(*parts: RenderableType, width: int | None = None, colour: bool = False) -> list[str]:
    """Return what rich draws, line by line and without blanks at their ends.

    rich is imported here, so that a launch does not wait for it.

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
