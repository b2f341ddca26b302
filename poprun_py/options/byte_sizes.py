"""The option type of sizes in bytes, such as ``100MB`` or ``2GiB``, or ``none`` for no limit.

The units are those of GNU tools: ``MB`` is 1000 * 1000 bytes; ``MiB`` and ``M`` are 1024 * 1024.
"""

from __future__ import annotations

import re
from typing import Any, Final

from poprun_py.options.option_types import OptionType

NO_LIMIT: Final = "none"
# Output is limited in parts of an eighth of the limit. Smaller parts would hold only a few lines.
LEAST_BYTES: Final = 64 << 10
_MOST_BYTES: Final = 1 << 60
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(ib|b)?|b)?", re.ASCII | re.IGNORECASE)
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def size_in_bytes(text: str) -> int | None:
    """Return the number of bytes in a text such as ``100MB``, ``2GiB`` or ``65536``.

    Returns:
        The number of bytes; None for ``none``.

    Raises:
        ValueError: The text is not a size.
    """
    if text.lower() == NO_LIMIT:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, letter, end = match.groups()
    factor = 1000 if (end or "").lower() == "b" else 1024
    size = float(number) * factor ** _POWERS.get((letter or "").lower(), 0)
    return int(min(size, 2.0 * _MOST_BYTES))


def _is_size(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return False
    try:
        size = size_in_bytes(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return size is None or LEAST_BYTES <= size <= _MOST_BYTES


SIZE = OptionType(
    metavar="SIZE|none",
    expected="a size of at least 64KiB, such as 100MB or 2GiB; or none",
    read=str,
    accepts=_is_size,
    keyword="int | str",
    normalise=str,
)
