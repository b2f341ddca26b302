"""Who takes what the launcher says while a job runs. Nothing here says anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Callbacks", "Console", "Log"]

Log = Callable[[str], None]


class Console(Protocol):
    """Takes what the launcher says while a job runs."""

    def log(self, line: str, /) -> None:
        """Take a line of the launcher's own log."""

    def warn(self, sentence: str, /) -> None:
        """Take what the user should know at any verbosity."""

    def binding(self, line: str, /) -> None:
        """Take what the kernel says of an instance's binding."""

    def tell(self, sentence: str, /) -> None:
        """Take what became of something that the user asked for, at any verbosity."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """A console made of functions."""

    log: Log
    warn: Log
    binding: Log
    tell: Log
