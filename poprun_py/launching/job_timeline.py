"""The timeline of a run, which merges the spans of all attempts into one trace.

With --output-dir, the spans are kept in the run's folder, where they remain if the launcher is
killed. Without --output-dir, the spans are in temporary folders.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from popdist_py.errors import counted
from poprun_py.errors import StartError, UsageError, explain_os_error
from poprun_py.instance.job_folders import JobFolder
from poprun_py.options.option_types import AUTO
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job_description import FilePlace, place_of_spans
from poprun_py.running.supervise.launcher_folder import make_launcher_folder

if TYPE_CHECKING:
    from popdist_py.timeline.merging import Merged

TIMELINE_FILE: Final = "timeline.json.gz"
_FOLDER: Final = "spans"
# The most attempts whose spans are kept. Each attempt takes up to --timeline-size of disk space.
_MOST_ATTEMPTS: Final = 8
# The least size of an instance's file of spans. A smaller file would hold only a few hundred spans.
_LEAST_BYTES: Final = 1 << 18


class JobTimeline:
    """The timeline of one run.

    Args:
        planned: The plan of the run.
        run_folder: The folder of the run; None without --output-dir.

    Raises:
        UsageError: The trace cannot be written at the path of --timeline.
    """

    def __init__(self, planned: LaunchPlan, run_folder: Path | None) -> None:
        config = planned.config
        self._size = config.timeline_size << 20
        self._path: Path | None = None
        self._folders: list[Path] = []
        self._held: list[JobFolder] = []  # temporary folders for spans, used without --output-dir
        self._has_dropped = False
        self._first = 1  # the attempt number of the first folder of spans
        self._is_in_run = False
        if config.timeline is not None:
            is_auto = config.timeline == AUTO
            self._is_in_run = is_auto and run_folder is not None
            given = TIMELINE_FILE if is_auto else config.timeline
            self._path = (run_folder or Path()) / given if is_auto else Path(given)
            # The path is checked before the job starts. An error at the end of the job would be too
            # late to choose another path.
            folder = self._path.parent
            if not folder.is_dir() or self._path.is_dir() or not os.access(folder, os.W_OK):
                raise UsageError(
                    f"{config.shown('timeline')}: expected the path of a file in a folder that is "
                    "there and can be written to"
                )

    def begin(self, planned: LaunchPlan, attempt_folder: str | None) -> FilePlace | None:
        """Return the place for the spans of the next attempt; None without --timeline.

        Raises:
            StartError: The folder cannot be made.
        """
        if self._path is None:
            return None
        folder = self._make_folder(attempt_folder)
        if not self._folders and attempt_folder is not None:
            self._first = int(attempt_folder.rpartition("-")[2])
        self._folders.append(folder)
        if len(self._folders) > _MOST_ATTEMPTS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
            self._first += 1
            self._has_dropped = True
        share = self._size // len(planned.instances)
        return place_of_spans(folder, max(_LEAST_BYTES, share))

    def finish(self) -> Merged | None:
        """Write the trace; return None without --timeline, or if no program started.

        Raises:
            OSError: The trace cannot be written. The caller can then keep the spans with ``keep``.
        """
        if self._path is None or not self._folders:
            return None
        # This module is imported only at the end of a job with a timeline.
        from popdist_py.timeline.merging import merge_files, recorded_instances

        instances = recorded_instances(self._folders, self._first)
        if instances and self._is_in_run:
            _keep_earlier(self._path)
        merged = merge_files(instances, self._path) if instances else None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        return merged

    def sentence(self, merged: Merged) -> str:
        """Return a sentence about the written timeline."""
        attempts = f"; of the last {_MOST_ATTEMPTS} attempts" if self._has_dropped else ""
        dropped = (
            f", {counted(merged.num_dropped, 'older one', ',')} dropped"
            if merged.num_dropped
            else ""
        )
        clocks = merged.clock_error / 1e6
        bound = f"; clocks of the hosts agree to {clocks:.3f} ms" if merged.spans_hosts else ""
        waited = f"{merged.waited / 1e9:.3g} s"
        waits = f"; others waited {waited} for {merged.waited_for}" if merged.waited_for else ""
        troubles = "".join(f"; {trouble}" for trouble in merged.troubles)
        return (
            f"timeline: {merged.path}: "
            f"{counted(merged.num_spans, 'span', ',')}{dropped}{attempts}{bound}"
            f"{waits}{troubles}; open it at ui.perfetto.dev"
        )

    def keep(self) -> list[Path]:
        """Keep the folders of the spans, which ``close`` would remove, and return their paths."""
        kept, self._folders = self._folders, []
        private = {Path(held.path) for held in self._held}
        return [_kept(folder) if folder in private else folder for folder in kept]

    def _make_folder(self, attempt_folder: str | None) -> Path:
        """Make a private folder for the spans of an attempt.

        Raises:
            StartError: The folder cannot be made.
        """
        if attempt_folder is None:
            self._held.append(make_launcher_folder())
            return Path(self._held[-1].path)
        folder = Path(attempt_folder, _FOLDER)
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise StartError(explain_os_error(error, f"{folder} cannot be made")) from None
        return folder

    def close(self) -> None:
        """Remove the temporary folders."""
        for folder in self._folders:
            if folder.name != _FOLDER:
                shutil.rmtree(folder, ignore_errors=True)
        for held in self._held:
            held.close()


def _kept(folder: Path) -> Path:
    """Rename a folder so that later jobs do not remove it as abandoned."""
    kept = folder.with_name(f"{folder.name}-kept")
    try:
        folder.rename(kept)
    except OSError:
        return folder
    return kept


def _keep_earlier(path: Path) -> None:
    """Rename the trace of an earlier launch of the same run to ``timeline-1.json.gz`` and so on."""
    if path.exists():
        names = (path.with_name(f"timeline-{n}.json.gz") for n in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))
