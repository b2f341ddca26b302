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
from poprun_py.errors import UsageError, start_errors
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
    """The timeline of one run with --timeline. The run has a folder only with --output-dir.

    Raises:
        UsageError: The trace cannot be written at the path of --timeline.
    """

    def __init__(self, planned: LaunchPlan, run_folder: Path | None) -> None:
        config = planned.config
        assert config.timeline is not None
        self._size = config.timeline_size << 20
        self._path = Path(config.timeline)
        if config.timeline == AUTO:
            self._path = (run_folder or Path()) / TIMELINE_FILE
        self._is_in_run = config.timeline == AUTO and run_folder is not None
        self._folders: list[Path] = []
        self._temporary: JobFolder | None = None  # the parent of the folders without --output-dir
        self._first = 1  # the attempt number of the first folder of spans
        self._has_dropped = False
        # The path is checked before the job starts. An error at the end of the job would be too
        # late to choose another path.
        folder = self._path.parent
        if not folder.is_dir() or self._path.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(
                f"{config.shown('timeline')}: expected the path of a file in a folder that is "
                "there and can be written to"
            )

    def begin(self, planned: LaunchPlan, attempt_folder: str | None) -> FilePlace:
        """Return the place for the spans of the next attempt.

        Raises:
            StartError: The folder cannot be made.
        """
        if attempt_folder is not None:
            folder = Path(attempt_folder, _FOLDER)
            if not self._folders:
                self._first = int(attempt_folder.rpartition("-")[2])
        else:
            # A program that removes old files may remove the folder while the job runs.
            if self._temporary is None or not Path(self._temporary.path).is_dir():
                self.close()
                self._temporary = make_launcher_folder()
            folder = Path(self._temporary.path, f"{_FOLDER}-{self._first + len(self._folders)}")
        with start_errors(f"{folder} cannot be made"):
            folder.mkdir(mode=0o700)
        self._folders.append(folder)
        if len(self._folders) > _MOST_ATTEMPTS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
            self._first += 1
            self._has_dropped = True
        share = self._size // len(planned.instances)
        return place_of_spans(folder, max(_LEAST_BYTES, share))

    def finish(self) -> Merged | None:
        """Write the trace; return None if no program started.

        Raises:
            OSError: The trace cannot be written. The caller can then keep the spans with ``keep``.
        """
        # This module is imported only at the end of a job with a timeline.
        from popdist_py.timeline.merging import merge_files, recorded_instances

        instances = recorded_instances(self._folders, self._first)
        if instances and self._is_in_run:
            _keep_earlier(self._path)
        merged = merge_files(instances, self._path) if instances else None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = []
        return merged

    def sentence(self, merged: Merged) -> str:
        """Return a sentence about the written timeline."""
        parts = [f"timeline: {merged.path}: {counted(merged.num_spans, 'span', ',')}"]
        if merged.num_dropped:
            parts[0] += f", {counted(merged.num_dropped, 'older one', ',')} dropped"
        if self._has_dropped:
            parts.append(f"of the last {_MOST_ATTEMPTS} attempts")
        if merged.spans_hosts:
            parts.append(f"clocks of the hosts agree to {merged.clock_error / 1e6:.3f} ms")
        if merged.waited_for:
            parts.append(f"others waited {merged.waited / 1e9:.3g} s for {merged.waited_for}")
        return "; ".join([*parts, *merged.troubles, "open it at ui.perfetto.dev"])

    def keep(self) -> list[Path]:
        """Keep the folders of the spans, which ``close`` would remove, and return their paths."""
        folders, self._folders = self._folders, []
        if self._temporary is None:
            return folders
        # Under another name, later jobs do not remove the folder as abandoned.
        old = Path(self._temporary.path)
        kept = old.with_name(f"{old.name}-kept")
        try:
            old.rename(kept)
        except OSError:
            kept = old
        self._temporary.close()
        self._temporary = None
        return [kept / folder.name if folder.parent == old else folder for folder in folders]

    def close(self) -> None:
        """Remove the temporary folders."""
        if self._temporary is not None:
            self._temporary.remove()


def _keep_earlier(path: Path) -> None:
    """Rename the trace of an earlier launch of the same run to ``timeline-1.json.gz`` and so on."""
    if path.exists():
        names = (path.with_name(f"timeline-{n}.json.gz") for n in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))
