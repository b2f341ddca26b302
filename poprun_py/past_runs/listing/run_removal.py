"""Removal of the folders of old runs.

The folder of a run that has not ended, links and files of other programs are never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from poprun_py.errors import UsageError
from poprun_py.past_runs.listing.latest_link import repair_latest
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import RunSummary, read_summaries

_REPORT: Final = "report.json"
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A run of another host may still be running, so it is only removed if the user asks for it.
_ENDED: Final = frozenset({RunState.FINISHED, RunState.FAILED, RunState.INTERRUPTED, RunState.LOST})


class KeptRunError(Exception):
    """A run could not be removed; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of removing runs: the removed runs, and the reasons why other runs were kept."""

    removed: tuple[RunSummary, ...]
    troubles: tuple[str, ...] = ()


def old_runs(
    runs: Iterable[RunSummary], *, before: float, states: frozenset[RunState] = frozenset()
) -> list[RunSummary]:
    """Return the runs that may be removed because they ended before a moment.

    Args:
        runs: The runs to choose from.
        before: The moment, in seconds since the epoch.
        states: The states that the user asked for. With ``UNKNOWN``, runs of other hosts without
            any sign of life are returned, too.
    """
    return [
        run
        for run in runs
        if _may_be_removed(run.state, states) and run.ended_at is not None and run.ended_at < before
    ]


def _may_be_removed(state: RunState, states: frozenset[RunState]) -> bool:
    return state in _ENDED or (state is RunState.UNKNOWN and state in states)


def disk_bytes(folder: Path) -> int:
    """Return the disk space of a folder's files, without following links."""
    return sum(512 * each.st_blocks for each in _stats(folder))


def _stats(folder: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    yield from _stats(Path(entry.path))


def remove_runs(parent: Path, runs: Iterable[RunSummary]) -> Removal:
    """Remove the folders of runs, and point the link ``latest`` to the newest remaining run.

    A run that another process removes at the same time counts as neither removed nor kept.
    """
    removed: list[RunSummary] = []
    kept: dict[Path, str] = {}
    for run in runs:
        try:
            if remove_run(parent, run):
                removed.append(run)
        except (KeptRunError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            kept[parent / run.name] = f"{run.name} is kept: {reason}"
    # Another process may have removed a run that it had locked.
    troubles = [sentence for path, sentence in kept.items() if path.exists()]
    try:
        left = read_summaries(parent)
        repair_latest(parent, left[0].name if left else None)
    except (OSError, UsageError) as error:
        troubles.append(f"the link named latest cannot be changed: {error}")
    return Removal(tuple(removed), tuple(troubles))


def remove_run(parent: Path, run: RunSummary) -> bool:
    """Remove the folder of a run; return False if the folder does not exist any more.

    report.json is removed last. If the removal is interrupted, the rest is still a run that can be
    removed.

    Raises:
        KeptRunError: The run is running again, or was changed since ``run`` was read.
        OSError: A file of the run cannot be removed.
    """
    with contextlib.ExitStack() as opened:
        try:
            outer = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, outer)
            folder = os.open(run.name, _OPEN_FOLDER, dir_fd=outer)
            opened.callback(os.close, folder)
        except FileNotFoundError:
            return False
        _lock(folder)
        try:
            report_ns = os.stat(_REPORT, dir_fd=folder, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return False
        if report_ns != run.report_ns:
            raise KeptRunError("the run was continued or changed in the meantime")
        _remove_contents(folder)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(run.name, dir_fd=outer)
    return True


def _lock(folder: int) -> None:
    """Lock the folder of a run, so that no launcher continues the run."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise KeptRunError("another process uses or removes the run") from None
    except OSError:
        pass  # the file system does not support locks


def _remove_contents(folder: int) -> None:
    names = sorted(os.listdir(folder), key=lambda name: name == _REPORT)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
