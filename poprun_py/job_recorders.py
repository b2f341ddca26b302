"""Who records what a job does: opened once for a run, asked at each attempt, closed at its end.

Nothing here decides what is recorded, or how: each recorder is a class of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poprun_py.observation.records import Recorder

__all__ = ["JobRecorders"]


class JobRecorders:
    """The recorders of one run; close them when it has ended and the last look was handed on."""

    def __init__(self) -> None:
        self._close_of_attempt: Callable[[], None] | None = None

    def begin(self, attempt_folder: str | None) -> tuple[Recorder, ...]:
        """Return who records the next attempt.

        Args:
            attempt_folder: of --output-dir; None without it.
        """
        self._end_attempt()
        if attempt_folder is None:
            return ()
        from poprun_py.observation.run_log import RunLog

        log = RunLog(Path(attempt_folder))
        self._close_of_attempt = log.close
        return (log,)

    def close(self) -> None:
        """Write what is left, and let go of files and connections."""
        self._end_attempt()

    def _end_attempt(self) -> None:
        close, self._close_of_attempt = self._close_of_attempt, None
        if close is not None:
            with contextlib.suppress(OSError):
                close()
