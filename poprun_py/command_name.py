"""Under which name the user called a command of ours: usage and messages say the same."""

from __future__ import annotations

import sys

__all__ = ["SDK_NAME", "command_name"]

# The name that the SDK gives its launcher.
SDK_NAME = "poprun"

_USUAL = "poprun-py"
_OF_PODS = "poprun-py-pod"
_OTHERS = (SDK_NAME, "gc-info", "gc-monitor", _OF_PODS)


def command_name() -> str:
    """Return the name of the running command; ``poprun-py`` also for ``python -m poprun_py``."""
    folder, _, called = sys.argv[0].rpartition("/") if sys.argv else ("", "", "")
    if folder.endswith("poprun_py/pods/command"):
        return _OF_PODS
    return called if called in _OTHERS else _USUAL
