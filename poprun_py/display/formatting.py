"""Formatting of numbers, amounts of memory, times and lists as text, and parsing of JSON.

All commands and pages use this module, so that values of one kind look the same everywhere.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Return the parsed value of a JSON text.

    A JSON object that repeats a name is rejected, because a person might read the first value
    while a program uses the last value.

    Raises:
        ValueError: The text is not JSON, nests too deeply, or repeats a name. The error message is
            one short line.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("the JSON value nests too deeply") from None
    except UnicodeDecodeError as error:
        # Raise a short error, because the repr of a UnicodeDecodeError contains the whole input.
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} is given twice")
    return table


def loss_to_json(loss: float | None) -> float | str | None:
    """Return a loss as a JSON value; NaN and infinities become "nan", "inf" and "-inf"."""
    return loss if loss is None or math.isfinite(loss) else str(loss)


def loss_from_json(loss: float | str | None) -> float | None:
    """Return the loss from a JSON value that ``loss_to_json`` returned.

    Raises:
        TypeError, ValueError: ``loss`` is not the JSON value of a loss.
    """
    return None if loss is None else float(loss)


def printable(text: str, *, keep: str = "", replacement: str = "?") -> str:
    """Replace control characters, so that text from other users cannot control the terminal.

    The control characters in ``keep`` stay.
    """
    return "".join(c if c.isprintable() or c in keep else replacement for c in text)


def number_text(value: float) -> str:
    """Return a number with three significant digits; from 100 on, as an integer: ``12,345``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bytes_text(count: float, *, decimals: int = 1) -> str:
    """Return an amount of memory: ``16.0 GiB``, ``345 MiB`` or ``12 KiB``.

    ``count`` is in bytes. ``decimals`` is the number of decimals of an amount in GiB.
    """
    if count >= 1 << 30:
        return f"{count / (1 << 30):.{decimals}f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= 1 << 20 else f"{count / 1024:.0f} KiB"


def milliseconds_text(seconds: float) -> str:
    """Return a short duration in milliseconds: ``12.3 ms``."""
    return f"{number_text(seconds * 1e3)} ms"


def duration_text(seconds: float) -> str:
    """Return a duration: ``3.21 s``, ``4 min 10 s`` or ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def date_text(seconds: float, *, milliseconds: bool = False) -> str:
    """Return local date and time of ``seconds`` since the epoch: ``2026-01-31 12:00:00``."""
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{text}.{int(seconds * 1000) % 1000:03}" if milliseconds else text


def clock_text(seconds: float) -> str:
    """Return the local time of day of ``seconds`` since the epoch: ``12:00:00.250``."""
    return date_text(seconds, milliseconds=True).partition(" ")[2]


def iso_time(seconds: float) -> str:
    """Return a time since the epoch in ISO 8601: local time with milliseconds and zone."""
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def iso_date_text(moment: object) -> str:
    """Convert a time in ISO format to ``2026-01-31 12:00:00 +0100``; return "" for other values."""
    from datetime import datetime

    try:
        return f"{datetime.fromisoformat(str(moment)):%Y-%m-%d %H:%M:%S %z}"
    except ValueError:
        return ""


def ranges_text(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's format for CPU lists: ``(0, 1, 2, 8)`` becomes ``0-2,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Return a noun with its numbers: ``IPU 3`` or ``IPUs 3-5``."""
    several = set(numbers)
    return f"{noun}{'' if len(several) == 1 else 's'} {ranges_text(several)}"
