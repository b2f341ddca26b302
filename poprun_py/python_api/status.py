"""The status of a job, which ``JobHandle.status`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from popdist_py.errors import counted
from poprun_py.display.public_values import Displayed

if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView

JobState = Literal["preparing", "waiting", "running", "stopping", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus(Displayed):
    """The state of a job at one time.

    Attributes:
        state: ``preparing`` before the start of the programs; ``waiting`` while other jobs hold the
            cores or IPUs that the job needs; ``running`` after the start of the programs;
            ``stopping`` after a request to stop; ``ended`` after the end of the job.
        seconds: The seconds since the job was started; after its end, the duration of the job.
        pid: The process id of the job's launcher, which ``poprun-py --status`` accepts.
        run_id: The name of the run; empty until the run has a name.
        num_instances: The number of instances; None until the number is known.
        waits_for: The resources that the job waits for, as text; empty if the job does not wait.
        view: The progress of the job's instances; None unless the job is running.
        exit_code: The exit code of the job, or of the LaunchError if the job could not start; None
            until the job has ended.
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
        """Return one line, such as ``running, 2 instances, step 120, 12 s``."""
        state: str = self.state
        if self.exit_code is not None:
            state = "ended well" if not self.exit_code else f"ended with code {self.exit_code}"
        elif self.waits_for:
            state = f"waiting ({self.waits_for})"
        words = [state]
        if self.num_instances:
            words.append(counted(self.num_instances, "instance"))
        if self.view is not None and self.view.step is not None:
            words.append(f"step {self.view.step}")
        words.append(f"{self.seconds:.0f} s" if self.seconds >= 10 else f"{self.seconds:.1f} s")
        return ", ".join(words)
