"""The record of one run: its folder, its timeline, its metrics and its HTML page.

If a file or port for the record cannot be used, the job does not start. Later problems with the
record are reported as warnings, and do not change the result of the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from popdist_py.environment import RUN_ID, is_popdist_environment
from poprun_py.errors import LaunchError, StartError, UsageError, explain_os_error, shortened
from poprun_py.launching.job_timeline import JobTimeline
from poprun_py.past_runs.run_files import LATEST, RunFiles
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job_description import FilePlace
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.terminal import Console, command_name

# Only launches with a run folder or with metrics import these modules at run time.
if TYPE_CHECKING:
    from poprun_py.launching.job_metrics import JobMetrics
    from poprun_py.launching.run_folder import RunFolder
    from poprun_py.running.attempt_files import FileRecorder
    from poprun_py.running.watch.records import Recorder

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The folders and recorders for the output and metrics of one attempt.

    Attributes:
        run_id: The name of the run.
        restart_count: The number of restarts before the attempt.
        folder: The folder for the output of the instances; None without --output-dir.
        spans: The place of the files with the instances' timeline spans; None without --timeline.
        recorders: The objects that record the instances' training steps and states.
        variables: Environment variables that tell the programs about the metrics.
    """

    run_id: str
    restart_count: int = 0
    folder: str | None = None
    spans: FilePlace | None = None
    recorders: tuple[Recorder, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class RunRecord:
    """A context manager that records one run, including an error that ends the run.

    Attributes:
        run_id: The name of the run.
        was_interrupted: Whether Ctrl-C interrupted the writing of the timeline or the page.

    Raises:
        UsageError: The run's name, the run's folder, a file or a port cannot be used.
        StartError: A process that writes or serves the metrics cannot be started.
    """

    def __init__(self, planned: LaunchPlan, console: Console) -> None:
        config = planned.config
        self.was_interrupted = False
        self.run_id = new_run_id(planned.environ)
        self._console = console
        self._steps: FileRecorder | None = None
        self._metrics: JobMetrics | None = None
        self._folder: RunFolder | None = None
        self._timeline: JobTimeline | None = None
        self._trace: Path | None = None  # the written timeline
        path = None
        with contextlib.ExitStack() as opened:
            if config.metrics_to or config.metrics_port is not None:
                from poprun_py.launching.job_metrics import JobMetrics

                self._metrics = JobMetrics(planned, self.run_id)
                opened.callback(self._metrics.close)
            if config.output_dir is not None:
                from poprun_py.launching.run_folder import RunFolder

                self._folder = RunFolder(planned, self.run_id)
                opened.callback(self._close_folder, self._folder)
                path = self._folder.path
            if config.timeline is not None:
                self._timeline = JobTimeline(planned, path)
                opened.callback(self._timeline.close)
            console.log(f"the run is {self.run_id}")
            if self._metrics is not None:
                self._metrics.start(path, console.tell)
            opened.callback(self._end_recorders)
            self._opened = opened.pop_all()

    def begin(self, planned: LaunchPlan, restart_count: int) -> AttemptRecord:
        """Return the folders and recorders for the next attempt.

        Raises:
            UsageError: The folder of the first attempt cannot be made.
            StartError: The folder for the timeline's spans cannot be made.
        """
        folder = None
        if self._folder is not None:
            folder = self._folder.begin_attempt(planned, restart_count)
        recorders = () if self._metrics is None else self._metrics.begin(restart_count)
        if folder is not None:
            from poprun_py.running.attempt_files import FileRecorder

            self._steps = FileRecorder(Path(folder))
            recorders = (self._steps, *recorders)
        return AttemptRecord(
            run_id=self.run_id,
            restart_count=restart_count,
            folder=folder,
            spans=None if self._timeline is None else self._timeline.begin(planned, folder),
            recorders=recorders,
            variables={} if self._metrics is None else self._metrics.variables,
        )

    def end(self, result: LaunchResult) -> None:
        """Record the result of the attempt that has just ended."""
        self._close_steps()
        if self._folder is not None:
            self._folder.end_attempt(result)

    def finish(self, exit_code: int, reason: str, cause: str = "") -> None:
        """Record the end of the run.

        If the last attempt has no recorded end yet, ``cause`` is recorded as the cause of its end.
        """
        self._write_timeline()
        self._end_recorders()
        if self._folder is not None:
            self._folder.finish(exit_code, reason, self._trace, cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Record an error or a signal that ended the run, and close the record."""
        with self._opened:
            match error:
                case LaunchError():
                    self.finish(error.exit_code, str(error), "refused")
                case OSError():
                    self.finish(StartError.exit_code, str(error), "refused")
                case KeyboardInterrupt():  # the Python API turns signals into KeyboardInterrupt
                    self._end_by(getattr(error, "signal", signal.SIGINT))
                case SystemExit(code=int(code)):  # a job with IPUs turns SIGTERM into SystemExit
                    self._end_by(code - 128)

    def _end_by(self, number: int) -> None:
        reason = f"{signal.Signals(number).name} received while no program was running"
        self.finish(128 + number, reason, "signal")

    def _close_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    def _end_recorders(self) -> None:
        self._close_steps()
        if self._metrics is not None:
            for trouble in self._metrics.finish(self._console.tell):
                self._console.warn(trouble)

    def _write_timeline(self) -> None:
        """Merge the spans of all attempts into one trace file, unless that was done before."""
        if self._timeline is None or self._trace is not None:
            return
        try:
            merged = self._timeline.finish()
        except (OSError, KeyboardInterrupt) as error:
            reason = self._explain(error, "the timeline")
            folders = shlex.join(map(str, self._timeline.keep()))
            self._console.warn(
                f"{reason}; python -m popdist_py.timeline {folders} makes it of the spans there"
            )
            return
        if merged is not None:
            self._trace = merged.path
            self._console.tell(self._timeline.sentence(merged))

    def _close_folder(self, folder: RunFolder) -> None:
        """Write the run's HTML page, and unlock the run's folder for other launchers."""
        if folder.has_begun:
            self._write_page(folder.path)
        folder.close()
        if folder.trouble:
            self._console.warn(folder.trouble)

    def _write_page(self, folder: Path) -> None:
        try:
            from poprun_py.past_runs.pages.run_page import write_page

            path = write_page(RunFiles(folder.resolve()))
            self._console.log(f"the page of the run is {path}")
        except (OSError, KeyboardInterrupt) as error:
            reason = self._explain(error, "the page of the run")
            command = f"{command_name()} report {shlex.quote(str(folder))}"
            self._console.warn(f"{reason}; {command} writes it")
        except Exception as error:  # reading a damaged file of the run can raise any exception
            self._console.warn(f"the page of the run cannot be written ({error})")

    def _explain(self, error: OSError | KeyboardInterrupt, what: str) -> str:
        """Return a text that says why a file was not written: an error, or Ctrl-C."""
        if isinstance(error, OSError):
            return explain_os_error(error, f"{what} cannot be written")
        self.was_interrupted = True
        return f"{what} is not written: interrupted"


def new_run_id(environ: Mapping[str, str]) -> str:
    """Return the name of a new run: the user's ``POPRUN_RUN_ID``, or a generated name.

    A generated name begins with the time in UTC, so that the names of runs sort by time. Inside an
    instance of another job, ``POPRUN_RUN_ID`` is the name of the other job's run and is not used.

    Raises:
        UsageError: The value of ``POPRUN_RUN_ID`` cannot be the name of a folder.
    """
    given = environ.get(RUN_ID, "")
    if not given or is_popdist_environment(environ):
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
    if not _FOLDER_NAME.fullmatch(given) or given == LATEST:
        raise UsageError(
            f"{RUN_ID}={shortened(repr(given))}: expected the name of a folder: a letter or "
            f"digit, then letters, digits, '.', '_' and '-', at most 128 in all, and not {LATEST!r}"
        )
    return given
