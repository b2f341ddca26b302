"""Runs of ``poprun-py scale``, launched one after another without output and then measured.

The measurements are read from the folders of the runs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from popdist_py.errors import counted
from poprun_py.display.formatting import milliseconds_text, number_text
from poprun_py.past_runs.measured_run import Measured, measure
from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.launch_result import Cause, LaunchResult
from poprun_py.terminal import Console, can_rewrite_lines, print_error, rewrite_line

if TYPE_CHECKING:
    from collections.abc import Set


class _OncePerWarning(Console):
    """A console for several launches, which prints each warning once and logs other messages."""

    def __init__(self, *, is_verbose: bool) -> None:
        super().__init__(is_verbose=is_verbose, prints_bindings=False)
        self._warned: Set[str] = frozenset()

    def warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned |= {sentence}
            super().warn(sentence)

    def tell(self, sentence: str) -> None:
        self.log(sentence)


class MeasuredRuns:
    """Launches runs one after another, and keeps their measurements.

    Args:
        folder: The folder that contains all runs (--output-dir).
        is_verbose: Whether the launcher's log is written to stderr.
    """

    def __init__(self, folder: Path, *, is_verbose: bool) -> None:
        self.measured: list[Measured] = []
        self.remarks: list[str] = []
        self.exit_code = 0
        self._folder = folder
        self._can_erase = can_rewrite_lines()
        self._console = _OncePerWarning(is_verbose=is_verbose)

    def make(self, planned: LaunchPlan, place: str) -> bool:
        """Launch and measure a run; return whether the next run may start.

        Args:
            planned: The plan of the run, with the run's name in its environment.
            place: The place of this run among all runs, such as ``[2/6]``, for progress messages.

        Raises:
            StartError: The run could not start.
        """
        title = f"{place} {counted(planned.topology.num_instances, 'instance')}"
        self._show_progress(title)
        result = self._launch(planned)
        measured = measure(read_run(RunFiles(self._folder / result.run_id)))
        is_limited = result.timed_out and measured.step_seconds is not None
        if result.exit_code and not is_limited:
            self._tell_end(planned, result, title)
            return False
        if is_limited:
            self._remark("runs were ended by --timeout; their speed until then counts")
        self.measured.append(measured)
        self._end_progress(f"{title}: {_told(measured)}")
        if result.was_interrupted:
            self.exit_code = 130
        return not result.was_interrupted

    def _launch(self, planned: LaunchPlan) -> LaunchResult:
        """Launch a plan. The instances' output is written only to the folder of the run."""
        from poprun_py.launching.launch import Request, launch

        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return launch(Request(planned, descriptors=(nowhere, nowhere)), self._console)
        finally:
            os.close(nowhere)

    def _tell_end(self, planned: LaunchPlan, result: LaunchResult, title: str) -> None:
        """Print the reason why a run failed; no further runs are measured."""
        from poprun_py.launching.failure_report import report_text

        self.exit_code = result.exit_code
        if result.cause is Cause.SIGNAL:
            self._end_progress(f"{title}: stopped")
            return
        self._end_progress(f"{title}: failed; its output is in {self._folder / result.run_id}")
        first = result.first_failure
        if first is not None:
            # The run's output was not shown, so the report must contain the end of stderr.
            result = replace(result, first_failure=replace(first, had_last_word=False))
        if report := report_text(result, planned.instance_label):
            print_error(report.removesuffix("\n"))

    def _remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def _show_progress(self, line: str) -> None:
        """Show the place and size of the current run on a terminal."""
        if self._can_erase:
            rewrite_line(f"{line} ...")

    def _end_progress(self, line: str) -> None:
        print_error(f"\r\x1b[K{line}" if self._can_erase else line)


def _told(measured: Measured) -> str:
    """Return the speed of a run as a short text."""
    parts = []
    if measured.samples_per_second is not None:
        parts.append(f"{number_text(measured.samples_per_second)} samples/s")
    if measured.step_seconds is not None:
        parts.append(f"{milliseconds_text(measured.step_seconds)} a step")
    if measured.seconds is not None:
        parts.append(f"{number_text(measured.seconds)} s")
    return ", ".join(parts)
