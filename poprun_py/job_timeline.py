"""The timeline of a run: the folders in which its attempts record, and the trace made of all.

The folders are the run's own with --output-dir, so that the spans are there also if the launcher is
killed; else temporary ones. Nothing here runs a job.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poprun_py.config.option_kinds import AUTO
from poprun_py.errors import StartError, UsageError, explain_os_error
from poprun_py.output.program_files import FilePlace, place_of_spans
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.supervision.private_folder import make_private_folder

if TYPE_CHECKING:
    from popdist_py.timeline.merging import Merged

__all__ = ["TIMELINE_FILE", "JobTimeline"]

TIMELINE_FILE: Final = "timeline.json.gz"
_FOLDER: Final = "spans"
# Below, a file would hold no more than a few hundred spans.
_LEAST_BYTES: Final = 1 << 18


class JobTimeline:
    """The timeline of one run.

    Args:
        planned: what runs.
        run_folder: the run's own folder; None without --output-dir.

    Raises:
        UsageError: the trace cannot be written where the user wants it.
    """

    def __init__(self, planned: LaunchPlan, run_folder: Path | None) -> None:
        config = planned.config
        self._size = config.timeline_size << 20
        self._path: Path | None = None
        self._folders: list[Path] = []
        if config.timeline is not None:
            is_auto = config.timeline == AUTO
            given = TIMELINE_FILE if is_auto else config.timeline
            self._path = (run_folder or Path()) / given if is_auto else Path(given)
            # Said now: when the job has ended is too late.
            folder = self._path.parent
            if not folder.is_dir() or self._path.is_dir() or not os.access(folder, os.W_OK):
                raise UsageError(
                    f"{config.shown('timeline')}: expected the path of a file in a folder that is "
                    "there and can be written to"
                )

    def begin(self, planned: LaunchPlan, attempt_folder: str | None) -> FilePlace | None:
        """Return where the next attempt records; None if no timeline is wanted.

        Raises:
            StartError: no folder can be made.
        """
        if self._path is None:
            return None
        folder = _make_folder(attempt_folder)
        self._folders.append(folder)
        share = self._size // len(planned.instances)
        return place_of_spans(folder, max(_LEAST_BYTES, share))

    def finish(self) -> str:
        """Make the trace; returns what is said of it, empty where none was wanted.

        Raises:
            OSError: it cannot be written; the spans stay in the run's folder.
        """
        if self._path is None or not self._folders:
            return ""
        # Reading and writing traces is for the end of jobs that want one.
        from popdist_py.timeline.merging import merge_files, recorded_instances

        merged = merge_files(recorded_instances(self._folders), self._path)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        return _sentence(merged)

    def close(self) -> None:
        """Remove what no run folder keeps."""
        for folder in self._folders:
            if folder.name != _FOLDER:
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(attempt_folder: str | None) -> Path:
    """Make the folder for the files of an attempt, which its owner alone can enter.

    Raises:
        StartError: it cannot be made.
    """
    if attempt_folder is None:
        return make_private_folder()
    folder = Path(attempt_folder, _FOLDER)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StartError(explain_os_error(error, f"{folder} cannot be made")) from None
    return folder


def _sentence(merged: Merged) -> str:
    """Say what became of the timeline."""
    dropped = f", {merged.num_dropped:,} older ones dropped" if merged.num_dropped else ""
    clocks = merged.clock_error / 1e6
    bound = f"; clocks of the hosts agree to {clocks:.3f} ms" if merged.spans_hosts else ""
    troubles = "".join(f"; {trouble}" for trouble in merged.troubles)
    return (
        f"timeline: {merged.path}: {merged.num_spans:,} spans{dropped}{bound}{troubles}; open it "
        "at ui.perfetto.dev"
    )
