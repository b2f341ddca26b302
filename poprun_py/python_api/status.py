"""JobStatus: how far a job is, and how that reads. A value; nothing is asked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from popdist_py.errors import counted

if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView

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

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> list[str]:
        """Return the parts of one line: ``running``, ``2 instances``, ``step 120``, ``12 s``."""
        state: str = self.state
        if self.exit_code is not None:
            state = "ended well" if not self.exit_code else f"ended with code {self.exit_code}"
        elif self.waits_for:
            state = f"waiting ({self.waits_for})"
        count = self.num_instances
        step = self.view.step if self.view is not None else None
        return [
            state,
            *([counted(count, "instance")] if count else []),
            *([f"step {step}"] if step is not None else []),
            f"{self.seconds:.0f} s" if self.seconds >= 10 else f"{self.seconds:.1f} s",
        ]

    def parts(self) -> tuple[str, ...]:
        """Return what the instances do, as parts of HTML; nothing where nobody knows."""
        if self.view is None:
            return ()
        from poprun_py.python_api.views.frame import note
        from poprun_py.python_api.views.job_views import view_parts, view_words

        return (*view_parts(self.view), *map(note, view_words(self.view)))

    def _repr_html_(self) -> str:
        from poprun_py.python_api.views.frame import framed, heading

        return framed(heading(str(self)), *self.parts())
