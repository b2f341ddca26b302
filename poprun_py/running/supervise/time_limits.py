"""What stops a job that goes on too long, and what is due at a time: the clock is an argument."""

from __future__ import annotations

from typing import Protocol

from poprun_py.running.supervise.job import Cause


class Timed(Protocol):
    """What has something to do at some time."""

    def next_deadline(self) -> float:
        """Return when that is; inf for never."""


class Limits:
    """The time limit of a job, and the time that instances have to follow one another.

    Args:
        grace_seconds: How long instances may go on after the first has ended at a checkpoint.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._limits: dict[Cause, tuple[float, str]] = {}
        self._paused_at: float | None = None

    def begin(self, now: float, timeout_seconds: float, spent_seconds: float) -> None:
        """Limit the job to ``timeout_seconds``, of which earlier runs have used some."""
        reason = f"the time limit of {timeout_seconds:g} s is over"
        self._limits[Cause.TIME_LIMIT] = (now + timeout_seconds - spent_seconds, reason)

    def saved(self, index: int, now: float) -> None:
        """An instance has ended at a checkpoint: the others have the grace time to follow."""
        reason = f"instance {index} ended at a checkpoint, others did not"
        self._limits.setdefault(Cause.STRAGGLER, (now + self._grace_seconds, reason))

    def pause(self, now: float) -> None:
        """Reach no limit until ``resume``."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> float:
        """Let time count again; returns the seconds that did not."""
        if self._paused_at is None:
            return 0.0
        paused, self._paused_at = now - self._paused_at, None
        for cause, (at, reason) in self._limits.items():
            self._limits[cause] = (at + paused, reason)
        return paused

    def next_deadline(self) -> float:
        """Return when the next limit is reached; inf for never."""
        if self._paused_at is not None:
            return float("inf")
        return min((at for at, _ in self._limits.values()), default=float("inf"))

    def on_time(self, now: float) -> tuple[Cause, str] | None:
        """Return the limit that is reached, once, with the reason in words."""
        if self._paused_at is not None:
            return None
        for cause, (at, reason) in self._limits.items():
            if now >= at:
                del self._limits[cause]
                return cause, reason
        return None
