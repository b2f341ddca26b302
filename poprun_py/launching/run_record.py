"""The record of one run: its folder, its timeline, its metrics and its HTML page.

If a file or port for the record cannot be used, the job does not start. Later problems with the
record are reported as warnings, and do not change the result of the job.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from popdist_py.environment import RUN_ID
from poprun_py.errors import LaunchError, StartError, explain_os_error, missing_package_text
from poprun_py.launching.job_timeline import JobTimeline, is_empty
from poprun_py.launching.run_names import choose_run_name
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.run_labels import labels_json, read_tags
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job_description import FilePlace
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.terminal import Console, command_name

# Only launches with a run folder or with metrics import these modules at run time.
if TYPE_CHECKING:
    from poprun_py.launching.job_metrics import JobMetrics
    from poprun_py.launching.restart_costs import RestartCost
    from poprun_py.launching.run_folder import RunFolder
    from poprun_py.running.attempt_files import FileRecorder
    from poprun_py.running.watch.records import Recorder


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The folders and recorders for the output and metrics of one attempt.

    Attributes:
        run_id: The name of the run.
        restart_count: The number of restarts before the attempt.
        folder: The folder for the output of the instances; None without --output-dir.
        spans: The place of the files with the instances' timeline spans; None without --timeline.
        labels: The tags and the note of the run, as in its report.
        recorders: The objects that record the instances' training steps and states.
        variables: Environment variables that tell the programs about the metrics.
    """

    run_id: str
    restart_count: int = 0
    folder: str | None = None
    spans: FilePlace | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    recorders: tuple[Recorder, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class RunRecord:
    """A context manager that records one run, including an error that ends the run.

    Attributes:
        run_id: The name of the run.
        report: After the end, the path of the run's page, or of its report.json if the page could
            not be written; None if there is neither, and without --output-dir.
        was_interrupted: Whether Ctrl-C interrupted the writing of the timeline or the page.

    Raises:
        UsageError: The run's name, the run's folder, a file or a port cannot be used.
        StartError: A process that writes or serves the metrics cannot be started.
    """

    def __init__(self, planned: LaunchPlan, console: Console) -> None:
        config = planned.config
        self.report: Path | None = None
        self.was_interrupted = False
        self._console = console
        self._steps: FileRecorder | None = None
        self._metrics: JobMetrics | None = None
        self._folder: RunFolder | None = None
        self._timeline: JobTimeline | None = None
        self._trace: Path | None = None  # the written timeline
        name = choose_run_name(config, planned.environ)
        self.run_id = name.text
        self._labels: Mapping[str, Any] = labels_json(read_tags(config.tag), config.note)
        path = None
        with contextlib.ExitStack() as opened:
            if config.metrics_to or config.metrics_port is not None:
                from poprun_py.launching.job_metrics import JobMetrics

                self._metrics = JobMetrics(planned)
                opened.callback(self._metrics.close)
            if config.output_dir is not None:
                from poprun_py.launching.run_folder import RunFolder

                self._folder = RunFolder(planned, name.text, is_new=name.is_for_new_run)
                opened.callback(self._close_folder, self._folder)
                path = self._folder.path
                self.run_id, self._labels = self._folder.run_id, self._folder.labels
            if config.timeline is not None:
                self._timeline = JobTimeline(planned, path)
                opened.callback(self._timeline.close)
            if self.run_id == name.text:
                console.log(f"the name of the run is {self.run_id}")
            else:
                console.tell(_renamed_text(name.text, self.run_id, config))
            if self._metrics is not None:
                self._metrics.start(self.run_id, self._labels, path, console.tell)
            opened.callback(self._end_recorders)
            self._opened = opened.pop_all()

    def note_resources(self, queue_seconds: float, *, shares_cores: bool) -> None:
        """Note how long the launch waited for cores and IPUs, and whether it shares cores."""
        if self._folder is not None:
            self._folder.note_resources(queue_seconds, shares_cores=shares_cores)

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
            labels=self._labels,
            spans=None if self._timeline is None else self._timeline.begin(planned, folder),
            recorders=recorders,
            variables={} if self._metrics is None else self._metrics.variables,
        )

    def prepare(self) -> None:
        """Do slow preparations for the end of the record, while mpirun starts the wrappers.

        ``finish`` and the page need no preparations, but without them they take longer.
        """
        if self._folder is None:
            return
        # An error here is raised again later, by code that reports it.
        with contextlib.suppress(Exception):
            from poprun_py.versions import versions

            versions(full=True)
            import jinja2  # noqa: F401

    def prepare_page(self) -> None:
        """Do slow preparations for the page, while the programs start."""
        if self._folder is None:
            return
        with contextlib.suppress(Exception):
            from poprun_py.past_runs.pages.run_page import prepare_page

            prepare_page()

    def note_restart(self, cost: RestartCost) -> None:
        """Record what the restart before the current attempt has cost."""
        if self._folder is not None:
            self._folder.note_restart(cost)

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
                f"{reason}; to make the timeline from the recorded spans, run python -m "
                f"popdist_py.timeline {folders}"
            )
            return
        if merged is not None:
            self._trace = merged.path
            say = self._console.warn if is_empty(merged) else self._console.tell
            say(self._timeline.sentence(merged))

    def _close_folder(self, folder: RunFolder) -> None:
        """Write the run's HTML page, and unlock the run's folder for other launchers."""
        if folder.has_begun:
            self.report = self._write_page(folder.path)
            report = RunFiles(folder.path.absolute()).report
            # On a full disk, report.json may be missing too.
            if self.report is None and report.is_file():
                self.report = report
        folder.close()
        if folder.trouble:
            self._console.warn(folder.trouble)

    def _write_page(self, folder: Path) -> Path | None:
        """Write the run's page and return its path; if that fails, warn and return None."""
        command = f"{command_name()} report {shlex.quote(str(folder))}"
        try:
            from poprun_py.past_runs.pages.run_page import write_page

            path = write_page(RunFiles(folder.resolve()))
            self._console.log(f"the page of the run is {path}")
            return RunFiles(folder.absolute()).page
        except (OSError, KeyboardInterrupt) as error:
            reason = self._explain(error, "the page of the run")
            self._console.warn(f"{reason}; to write the page, run {command}")
        except ModuleNotFoundError as error:
            reason = missing_package_text(error.name or "") or str(error)
            self._console.warn(f"the page of the run is not written: {reason}; then run {command}")
        except Exception as error:  # reading a damaged file of the run can raise any exception
            self._console.warn(f"the page of the run cannot be written ({error})")
        return None

    def _explain(self, error: OSError | KeyboardInterrupt, what: str) -> str:
        """Return a text that says why a file was not written: an error, or Ctrl-C."""
        if isinstance(error, OSError):
            return explain_os_error(error, f"{what} cannot be written")
        self.was_interrupted = True
        return f"{what} is not written, because the launcher was interrupted"


def _renamed_text(given: str, run_id: str, config: LaunchConfig) -> str:
    path = f"{config.output_dir}/{given}"
    # A file of this name is not a run that another launch could continue.
    hint = f" ({RUN_ID}={given} continues the run {given})" if Path(path).is_dir() else ""
    return f"the name of the run is {run_id}, because {path} already exists{hint}"
