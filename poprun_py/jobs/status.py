"""JobStatus: how far a job is. A value; nothing is asked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from poprun_py.observation.job_view import JobView

__all__ = ["JobState", "JobStatus"]

JobState = Literal["preparing", "waiting", "running", "stopping", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """How far a job is.

    Attributes:
        state: ``preparing`` until its programs start, unless it is ``waiting`` for cores or IPUs
            that others have; then ``running``; ``stopping`` when it was asked to end; ``ended``.
        seconds: since it was started, or that it took.
        pid: the process id of its launcher, by which ``poprun-py --status`` finds it.
        run_id: the name of the run; empty until it has one.
        num_instances: of the job; None until that is known.
        waits_for: whom it waits for, in words; empty if it does not wait.
        view: what its instances do; None unless it is running.
        exit_code: None until it has ended; that of a LaunchError if it could not start.
    """

    state: JobState
    seconds: float
    pid: int
    run_id: str = ""
    num_instances: int | None = None
    waits_for: str = ""
    view: JobView | None = None
    exit_code: int | None = None
