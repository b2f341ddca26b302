"""JSON that others may have written: a value, or a ValueError of one short line that says why not.

Beside what is no JSON, a name that stands twice in one object is refused: people would read one of
its values, and a program the other. What a value has to be is its reader's matter.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

__all__ = ["read_json"]


def read_json(text: str | bytes) -> Any:
    """Return what a text says.

    Args:
        text: bytes are UTF-8.

    Raises:
        ValueError: it is no such text, nests too deeply, or names something twice.
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
