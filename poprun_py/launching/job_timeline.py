"""The timeline of a run: the time spans of all attempts, merged into one trace file.

With --output-dir, the instances write their spans into the run's folder, where the spans remain if
the launcher is killed. Without --output-dir, the instances write their spans into temporary
folders.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from popdist_py.environment import counts_optimizers
from popdist_py.errors import counted
from poprun_py.errors import UsageError, start_errors
from poprun_py.instance.job_folders import JobFolder
from poprun_py.options.option_types import AUTO
from poprun_py.options.written_files import require_same_kind
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job_description import FilePlace, place_of_spans
from poprun_py.running.supervise.launcher_folder import make_launcher_folder

if TYPE_CHECKING:
    from popdist_py.timeline.merging import Merged

TIMELINE_FILE: Final = "timeline.json.gz"
_FOLDER: Final = "spans"
# The timeline keeps the spans of at most this many attempts. The spans of each attempt take up to
# --timeline-size of disk space.
_MOST_ATTEMPTS: Final = 8
# The smallest size in bytes of the file with an instance's spans. A smaller file would hold only a
# few hundred spans.
_LEAST_BYTES: Final = 1 << 18


_EMPTY: Final = (
    "the program used none of the operations that a timeline records: calls of PopTorch models, "
    "loops with an optimizer of torch, collectives of popdist_py, and popdist_py.span()"
)
_EMPTY_WITHOUT_LOOPS: Final = (
    "the program used none of the operations that a timeline records: calls of PopTorch models, "
    "collectives of popdist_py, and popdist_py.span(); POPDIST_COUNT_STEPS=no turns off the "
    "recording of loops with an optimizer of torch"
)


def is_empty(merged: Merged) -> bool:
    """Return whether the instances have recorded nothing, and no trouble explains this."""
    return not (merged.num_spans or merged.num_dropped or merged.troubles)


class JobTimeline:
    """The timeline of one run with --timeline; ``run_folder`` is None without --output-dir.

    Raises:
        UsageError: The trace file cannot be written at the path that --timeline gives.
    """

    def __init__(self, planned: LaunchPlan, run_folder: Path | None) -> None:
        config = planned.config
        assert config.timeline is not None
        environ = {**planned.environ, **dict(planned.instances[0].user_env)}
        self._records_loops = counts_optimizers(environ)
        self._size = config.timeline_size << 20
        self._path = Path(config.timeline)
        if config.timeline == AUTO:
            self._path = (run_folder or Path()) / TIMELINE_FILE
        self._is_in_run = config.timeline == AUTO and run_folder is not None
        self._folders: list[Path] = []
        self._temporary: JobFolder | None = None  # the parent of temporary folders of spans
        self._first = 1  # the number of the attempt of the first folder in ``_folders``
        self._has_dropped = False
        self._has_replaced = False
        # The path of the trace file is checked before the job starts. After the job, it would be
        # too late for the user to choose another path.
        folder = self._path.parent
        if not folder.is_dir() or self._path.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(
                f"{config.shown('timeline')}: expected the path of a file in an existing folder "
                "with write permission"
            )
        from popdist_py.timeline.folder import TRACE_BEGINNINGS

        require_same_kind(self._path, config.named("timeline"), "timeline", TRACE_BEGINNINGS)

    def begin(self, planned: LaunchPlan, attempt_folder: str | None) -> FilePlace:
        """Make a folder for the spans of the next attempt, and return its place.

        Raises:
            StartError: The folder for the spans cannot be made.
        """
        if attempt_folder is not None:
            folder = Path(attempt_folder, _FOLDER)
            if not self._folders:
                self._first = int(attempt_folder.rpartition("-")[2])
        else:
            # A program that removes old temporary files may have removed the folder of a long job.
            if self._temporary is None or not Path(self._temporary.path).is_dir():
                self.close()
                self._temporary = make_launcher_folder()
            folder = Path(self._temporary.path, f"{_FOLDER}-{self._first + len(self._folders)}")
        with start_errors(f"the folder {folder} cannot be created"):
            folder.mkdir(mode=0o700)
        self._folders.append(folder)
        if len(self._folders) > _MOST_ATTEMPTS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
            self._first += 1
            self._has_dropped = True
        share = self._size // len(planned.instances)
        return place_of_spans(folder, max(_LEAST_BYTES, share))

    def finish(self) -> Merged | None:
        """Merge all spans into the trace file; return None if no program started.

        Raises:
            OSError: The trace file cannot be written. The caller can then keep the spans with
                ``keep``.
        """
        # The code that merges spans is imported only at the end of a job with a timeline.
        from popdist_py.timeline.merging import merge_files, recorded_instances

        instances = recorded_instances(self._folders, self._first)
        if instances and self._is_in_run:
            _keep_earlier(self._path)
        self._has_replaced = bool(instances) and self._path.is_file()
        merged = merge_files(instances, self._path) if instances else None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = []
        return merged

    def sentence(self, merged: Merged) -> str:
        """Return a message that names the trace file and summarizes its contents."""
        replaced = " (replaced)" if self._has_replaced else ""
        parts = [f"timeline: {merged.path}{replaced}: {counted(merged.num_spans, 'span', ',')}"]
        if is_empty(merged):
            return f"{parts[0]}, because {_EMPTY if self._records_loops else _EMPTY_WITHOUT_LOOPS}"
        if merged.num_dropped:
            parts[0] += f", {counted(merged.num_dropped, 'older span', ',')} dropped"
        if self._has_dropped:
            parts.append(f"only the last {_MOST_ATTEMPTS} attempts are included")
        if merged.spans_hosts:
            parts.append(f"the clocks of the hosts agree to {merged.clock_error / 1e6:.3f} ms")
        if merged.waited_for:
            parts.append(
                f"other instances waited {merged.waited / 1e9:.3g} s for {merged.waited_for}"
            )
        return "; ".join([*parts, *merged.troubles, "open the file at ui.perfetto.dev"])

    def keep(self) -> list[Path]:
        """Protect the folders of spans from removal by ``close``, and return their paths."""
        folders, self._folders = self._folders, []
        if self._temporary is None:
            return folders
        # The folder gets another name, so that later jobs do not remove it as an abandoned folder.
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
        """Remove the temporary folder with the spans, if there is one."""
        if self._temporary is not None:
            self._temporary.remove()


def _keep_earlier(path: Path) -> None:
    """Rename the trace file of an earlier launch to the first free ``timeline-N.json.gz``."""
    if path.exists():
        names = (path.with_name(f"timeline-{n}.json.gz") for n in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))
