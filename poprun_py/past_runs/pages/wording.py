"""Numbers and times as pages word them. Nothing here knows runs or HTML."""

from __future__ import annotations

from datetime import datetime

from poprun_py.planning.views.text_drawing import number

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def milliseconds(seconds: float) -> str:
    """Return a short time as ``12.3 ms``."""
    return f"{number(seconds * 1e3)} ms"


def duration(seconds: float) -> str:
    """Return a time as ``3.21 s``, ``4 min 10 s`` or ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def bytes_text(count: float) -> str:
    """Return an amount of memory as ``1.5 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{number(count)} {_UNITS[unit]}"


def moment_text(moment: object) -> str:
    """Return a time of a report for people: ``2026-01-31 12:00:00 +0100``."""
    try:
        return f"{datetime.fromisoformat(str(moment)):%Y-%m-%d %H:%M:%S %z}"
    except ValueError:
        return ""


def listed(words: list[str]) -> str:
    """Return words as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
