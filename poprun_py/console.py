"""The console of the launcher: its command's name, its terminal, and who takes its messages.

Nothing here prints; ``terminal.py`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

# The name that the SDK gives its launcher.
SDK_NAME = "poprun"

_USUAL = "poprun-py"
_OF_PODS = "poprun-py-pod"
_OTHERS = (SDK_NAME, "gc-info", "gc-monitor", _OF_PODS)

Log = Callable[[str], None]


class Console(Protocol):
    """Takes the messages of the launcher while a job runs."""

    def log(self, line: str, /) -> None:
        """Take a line of the launcher's own log."""

    def warn(self, sentence: str, /) -> None:
        """Take a warning, which is shown at any verbosity."""

    def binding(self, line: str, /) -> None:
        """Take the kernel's report of an instance's binding."""

    def tell(self, sentence: str, /) -> None:
        """Take the outcome of something that the user asked for, shown at any verbosity."""

    def waiting(self, seconds: float, reason: str, /) -> None:
        """Take what the job is waiting for, repeatedly while it waits.

        Args:
            seconds: How long it has waited so far.
            reason: Such as "for IPUs: ..."; empty when the wait has ended.
        """


def command_name() -> str:
    """Return the name of the running command; ``poprun-py`` also for ``python -m poprun_py``."""
    called = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    if called == "pod_command.py":
        return _OF_PODS
    return called if called in _OTHERS else _USUAL


def can_erase(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal can erase and rewrite a line, which TERM=dumb cannot."""
    return environ.get("TERM") != "dumb"


def has_cursor(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal can keep rows in place, which needs a TERM other than dumb."""
    return bool(environ.get("TERM")) and can_erase(environ)


def may_colour(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal may get colours (https://no-color.org; not TERM=dumb)."""
    return can_erase(environ) and not environ.get("NO_COLOR")
