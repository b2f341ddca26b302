"""Everything that is kept of one run, as one thing: opened before it, told of each attempt, closed.

What cannot be kept is refused before anything starts; later it is a warning, and never changes how
the job ends.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from poprun_py.console import Console, command_name
from poprun_py.errors import LaunchError, explain_os_error
from poprun_py.launching.job_timeline import JobTimeline
from poprun_py.launching.run_record import RunRecord
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.running.supervise.file_transfer import FilePlace
from poprun_py.running.supervise.job import LaunchResult

# A launch does not wait for what it does not record.
if TYPE_CHECKING:
    from poprun_py.launching.job_metrics import JobMetrics
    from poprun_py.running.watch.file_recorder import FileRecorder
    from poprun_py.running.watch.records import Recorder


@dataclass(frozen=True, slots=True)
class AttemptRecording:
    """Where one attempt is recorded.

    Attributes:
        folder: for what its instances write; None without --output-dir.
        spans: where they record what they do when; None without --timeline.
        recorders: who takes their steps, and the looks at them.
        variables: that the programs are told of it.
    """

    folder: str | None = None
    spans: FilePlace | None = None
    recorders: tuple[Recorder, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class RunRecording:
    """What is kept of one run; close it at the end.

    Args:
        planned: what runs.
        console: takes what became of it.

    Attributes:
        was_interrupted: whether Ctrl-C came while something was written at the end.

    Raises:
        UsageError: the user's name for the run, its folder, a file, or a port cannot be used.
        StartError: a process that takes the numbers cannot be started.
    """

    def __init__(self, planned: LaunchPlan, console: Console) -> None:
        self.was_interrupted = False
        self._console = console
        with contextlib.ExitStack() as opened:
            self._metrics = _metrics_of(planned)
            if self._metrics is not None:
                opened.callback(self._metrics.close)
            self._log: FileRecorder | None = None
            self._record = RunRecord(planned)
            opened.callback(self._close_record)
            folder = self._record.folder.path if self._record.folder is not None else None
            self._timeline = opened.enter_context(contextlib.closing(JobTimeline(planned, folder)))
            console.log(f"the run is {self.run_id}")
            if self._metrics is not None:
                program = short_name(planned.config.program)
                self._metrics.start(self.run_id, program, folder, console.tell)
            opened.callback(self._end_recorders)
            self._opened = opened.pop_all()

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self._record.run_id

    def begin(self, planned: LaunchPlan, restart_count: int) -> AttemptRecording:
        """Return where the next attempt is recorded.

        Args:
            planned: what runs.
            restart_count: how often the job was started again before.

        Raises:
            UsageError: the folder of the first attempt cannot be made.
            StartError: that of the timeline cannot.
        """
        folder = self._record.begin(planned, restart_count)
        return AttemptRecording(
            folder=folder,
            spans=self._timeline.begin(planned, folder),
            recorders=self._begin_recorders(folder, restart_count),
            variables={} if self._metrics is None else self._metrics.variables(self.run_id),
        )

    def _begin_recorders(self, folder: str | None, restart_count: int) -> tuple[Recorder, ...]:
        others = () if self._metrics is None else self._metrics.begin(restart_count)
        if folder is None:
            return others
        from poprun_py.running.watch.file_recorder import FileRecorder

        self._log = log = FileRecorder(Path(folder))
        return (log, *others)

    def end(self, result: LaunchResult) -> None:
        """Note how the attempt ended."""
        self._end_log()
        self._record.end(result)

    def refuse(self, error: LaunchError) -> None:
        """Note that the programs of the attempt did not start, which ends the run."""
        self._finish_timeline()  # of the attempts before
        self._record.refuse(error)

    def interrupt(self, number: int) -> None:
        """Note that a signal ended the run while no program of it was running."""
        self._finish_timeline()
        self._record.interrupt(number)

    def finish(self, result: LaunchResult) -> None:
        """Note how the run ended."""
        self._finish_timeline()
        self._end_recorders()
        self._record.finish(result)

    def close(self) -> None:
        """Write what is left, and let go of files, connections and processes."""
        self._opened.close()

    def _end_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _end_recorders(self) -> None:
        self._end_log()
        if self._metrics is not None:
            for trouble in self._metrics.finish(self._console.tell):
                self._console.warn(trouble)

    def _finish_timeline(self) -> None:
        """Make the trace of a job that has ended."""
        try:
            merged = self._timeline.finish()
        except (OSError, KeyboardInterrupt) as error:  # the job has ended: its end counts
            reason = self._explain(error, "the timeline")
            folders = shlex.join(map(str, self._timeline.keep()))
            self._console.warn(
                f"{reason}; python -m popdist_py.timeline {folders} makes it of what is left"
            )
            return
        if merged is not None:
            self._console.tell(self._timeline.sentence(merged))
            self._record.timeline = merged.path

    def _close_record(self) -> None:
        """Write the page of all that is known, and let other launchers go on with the run."""
        self._write_page()
        self._record.close()
        if self._record.trouble:
            self._console.warn(self._record.trouble)

    def _write_page(self) -> None:
        if self._record.folder is None or not self._record.has_begun:
            return
        try:
            from poprun_py.launching.page_file import write_page
            from poprun_py.past_runs.run_files import RunFiles

            path = write_page(RunFiles(Path(self._record.folder.path).resolve()))
            self._console.log(f"the page of the run is {path}")
        except (OSError, KeyboardInterrupt) as error:
            reason = self._explain(error, "the page of the run")
            folder = shlex.quote(str(self._record.folder.path))
            self._console.warn(f"{reason}; {command_name()} report {folder} writes it")
        except Exception as error:  # whatever its files hold
            self._console.warn(f"the page of the run cannot be written ({error})")

    def _explain(self, error: OSError | KeyboardInterrupt, what: str) -> str:
        """Return why something was not written: it could not be, or nobody wanted to wait."""
        if isinstance(error, OSError):
            return explain_os_error(error, f"{what} cannot be written")
        self.was_interrupted = True
        return f"{what} is not written: interrupted"


def _metrics_of(planned: LaunchPlan) -> JobMetrics | None:
    """Return where the numbers of a run go; None if nobody wants them.

    Raises:
        UsageError: they cannot go there.
    """
    if not planned.config.metrics_to and planned.config.metrics_port is None:
        return None
    from poprun_py.launching.job_metrics import JobMetrics

    return JobMetrics(planned)
