"""Under which name the user called a command of ours: usage and messages say the same."""

from __future__ import annotations

import sys

__all__ = ["command_name"]

_USUAL = "poprun-py"
_OTHERS = ("poprun", "gc-info", "gc-monitor")


def command_name() -> str:
    """Return the name of the running command; ``poprun-py`` also for ``python -m poprun_py``."""
    called = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    return called if called in _OTHERS else _USUAL
