"""What the user's terminal is capable of, as the environment tells it.

The one place that reads TERM and NO_COLOR. Nothing here asks whether there is a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["can_erase", "has_cursor", "may_colour"]


def can_erase(environ: Mapping[str, str]) -> bool:
    """Tell whether a line can be erased and written anew: not where TERM is ``dumb``."""
    return environ.get("TERM") != "dumb"


def has_cursor(environ: Mapping[str, str]) -> bool:
    """Tell whether rows can be kept in place: on a terminal that says which it is."""
    return bool(environ.get("TERM")) and can_erase(environ)


def may_colour(environ: Mapping[str, str]) -> bool:
    """Tell whether a terminal may get colours: https://no-color.org, and not a dumb one."""
    return can_erase(environ) and not environ.get("NO_COLOR")
