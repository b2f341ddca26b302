"""The page of a run as a file: reads what the run left, and writes ``report.html``.

What is on the page: poprun_py/past_runs/pages. Nothing here prints.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from popdist_py.atomic_file import write_whole
from poprun_py.past_runs.pages.run_page import run_page
from poprun_py.past_runs.recorded_run import NOT_A_RUN, damaged_report, read_run
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.texts import iso_time


def page_text(files: RunFiles, folder: Path | None = None) -> str:
    """Return the page of a run, also of one that has not ended.

    Args:
        files: of the run.
        folder: where the page will lie, by default in the run's own.

    Raises:
        UsageError: its report cannot be read, or says what no report does.
    """
    run = read_run(files)
    excerpt = None
    if files.timeline.is_file():
        from poprun_py.past_runs.pages.timeline_excerpt import read_excerpt

        excerpt = read_excerpt(files.timeline)
    try:
        return run_page(run, iso_time(time.time()), excerpt, _address(files.folder, folder))
    except NOT_A_RUN as error:
        raise damaged_report(files, error) from None


def _address(run: Path, folder: Path | None) -> str:
    """Return the address of the run's files for a page in a folder."""
    if folder is None or folder.resolve() == run.resolve():
        return ""
    from urllib.parse import quote

    return f"{quote(os.fsencode(os.path.relpath(run.resolve(), folder.resolve())))}/"


def write_page(files: RunFiles, path: Path | None = None) -> Path:
    """Write the page of a run in one step, for its owner alone; returns where it is.

    Args:
        files: of the run.
        path: where to; by default ``report.html`` in the run's folder.

    Raises:
        UsageError: the run's report cannot be read.
        OSError: the page cannot be written; an older one stays as it was.
    """
    path = files.page if path is None else path
    write_whole(path, page_text(files, path.parent) + "\n")
    return path
