"""Who records what a job does: opened once for a run, asked at each attempt, closed at its end.

Nothing here decides what is recorded, or how: each recorder is a class of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.recording.job_metrics import JobMetrics

if TYPE_CHECKING:
    from poprun_py.observation.records import Recorder

__all__ = ["JobRecorders"]


class JobRecorders:
    """The recorders of one run; close them when it has ended and the last look was handed on.

    Args:
        metrics: where numbers go beside the files; its owner closes it.
    """

    def __init__(self, metrics: JobMetrics) -> None:
        self._metrics = metrics
        self._close_of_attempt: Callable[[], None] | None = None

    def begin(self, attempt_folder: str | None, restart_count: int) -> tuple[Recorder, ...]:
        """Return who records the next attempt.

        Args:
            attempt_folder: of --output-dir; None without it.
            restart_count: how often the job was started again before.
        """
        self._end_attempt()
        others = self._metrics.begin(restart_count)
        if attempt_folder is None:
            return others
        from poprun_py.observation.run_log import RunLog

        log = RunLog(Path(attempt_folder))
        self._close_of_attempt = log.close
        return (log, *others)

    def close(self) -> None:
        """Write what is left, and let go of files and connections."""
        self._end_attempt()

    def _end_attempt(self) -> None:
        close, self._close_of_attempt = self._close_of_attempt, None
        if close is not None:
            with contextlib.suppress(OSError):
                close()
