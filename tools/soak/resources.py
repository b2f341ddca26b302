"""Rows about a machine that has run out of something: room in a folder, or shared memory.

A folder that fills up or becomes read-only is a small file system of the case's own. What limits
processes, or moves their clock, is in limits.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tools.soak.jobs import Job
from tools.soak.kills import reach
from tools.soak.places import may_unshare
from tools.soak.program import PHASES
from tools.soak.rows import NUMPY, POPTORCH, Act, Done, Expected, Prepare, Row

_FILLER = "filler"
_CHUNK_BYTES, _PAGE_BYTES = 1 << 16, 1 << 12
_NO_MOUNTS = "a case can have no mounts of its own here: root is needed"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of a job.

    Attributes:
        title: of it in rows.
        name: in the folder of the case.
        variable: that makes the job use it, where it does not so by itself.
        mebibytes: of its file system.
    """

    title: str
    name: str
    mebibytes: int
    variable: str = ""

    def of(self, job: Job) -> Path:
        """Return its path as the case sees it."""
        return job.folder / self.name


OUTPUT = Folder(title="`--output-dir`", name="o", mebibytes=4, variable="POPRUN_OUTPUT_DIR")
CHECKPOINTS = Folder(title="the checkpoints' folder", name="c", mebibytes=16)
TEMPORARY = Folder(title="`TMPDIR`", name="t", mebibytes=64)
FOLDERS = (OUTPUT, CHECKPOINTS, TEMPORARY)


def needs_mounts() -> str:
    """Say why a case can have no mounts of its own here."""
    return "" if may_unshare() else _NO_MOUNTS


# --- what is done to a folder ---------------------------------------------------------------


def _mounted(folder: Folder) -> Prepare:
    """Give a folder a small file system of its own."""

    def prepare(job: Job, dice: random.Random) -> dict[str, str]:
        path = folder.of(job)
        size = f"size={folder.mebibytes}m"
        job.place.sh(f"mkdir -p {path} && mount -t tmpfs -o {size} tmpfs {path}")
        return {folder.variable: str(path)} if folder.variable else {}

    return prepare


def _fill(folder: Folder, job: Job) -> None:
    """Leave no room for another page, and no more than the file system has."""
    descriptor = os.open(job.place.inside(folder.of(job)) / _FILLER, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (_CHUNK_BYTES, _PAGE_BYTES):
            with contextlib.suppress(OSError):
                for _ in range((folder.mebibytes << 20) // size + 1):
                    os.write(descriptor, bytes(size))
    finally:
        os.close(descriptor)


def _free(folder: Folder, job: Job) -> None:
    (job.place.inside(folder.of(job)) / _FILLER).unlink(missing_ok=True)


def _make_read_only(folder: Folder, job: Job) -> None:
    """Have everything that is opened from now on lie in a read-only file system.

    The kernel refuses a remount as long as a file is open for writing, which the launcher's are.
    """
    path = folder.of(job)
    job.place.sh(f"mount --bind {path} {path} && mount -o remount,bind,ro {path}")


def _make_writable(folder: Folder, job: Job) -> None:
    if not os.access(job.place.inside(folder.of(job)), os.W_OK):
        job.place.sh(f"umount -l {folder.of(job)}")


Change = Callable[[Folder, Job], None]


def _during(folder: Folder, change: Change, undo: Change, lasts: bool) -> Act:
    """Change a folder at a drawn moment, for ever or for up to a second."""

    def act(job: Job, dice: random.Random) -> Done:
        phase, instance = dice.choice(PHASES), dice.randrange(job.place.num_instances)
        seconds = 0 if lasts else dice.uniform(0.05, 1)
        missed = reach(job, dice, "program", phase, instance) is None
        seen = job.phase(instance)
        if not missed:
            change(folder, job)
        at = time.monotonic()
        if not lasts and not missed:
            time.sleep(seconds)
            undo(folder, job)
        what = f"for {seconds:.2f} s" if seconds else ""
        return Done(at=at, phase=seen, missed=missed, what=what)

    return act


_TROUBLES: tuple[tuple[str, Change, Change, str], ...] = (
    ("full", _fill, _free, "No space left on device"),
    ("read-only", _make_read_only, _make_writable, "Read-only file system"),
)


# --- what has to follow ---------------------------------------------------------------------

_GOES_ON = Expected(codes=(0,), seconds=20)
# The next save comes after at most four steps; from an early phase on, after the start.
_START_SECONDS, _SAVE_SECONDS = 10, 4
# MPI needs it to start, finds out in one of several ways, and the launcher says which folder it is.
_NO_ROOM = Expected(
    codes=(3, 1, 14, 135), seconds=_START_SECONDS, says="MPI needs space for its own files in .*/t:"
)


def _folder_rows(title: str, change: Change, undo: Change, error: str) -> Iterator[Row]:
    """Yield what follows where each folder has one trouble, for ever or for a while."""
    for folder in FOLDERS:
        for lasts in (True, False):
            expected, by_phase = _expected(folder, error, lasts)
            yield Row(
                title=f"{folder.title} {title}{'' if lasts else ' for a while'}",
                needs=needs_mounts,
                prepare=_mounted(folder),
                act=_during(folder, change, undo, lasts),
                mend=lambda job, folder=folder: undo(folder, job),
                expected=expected,
                by_phase=by_phase,
                # The launcher cannot remove its own files from what cannot be written.
                swept=folder is TEMPORARY and change is _make_read_only,
            )


def _expected(folder: Folder, error: str, lasts: bool) -> tuple[Expected, dict[str, Expected]]:
    """Return what has to follow, and the exceptions by phase.

    Only a save needs its folder to go on; one may have been the last, or none may have been tried
    for a while.
    """
    if folder is OUTPUT:
        return replace(_GOES_ON, says=f"/o.*{error}" if lasts else ""), {}
    if folder is TEMPORARY:
        return _GOES_ON, {"start": replace(_NO_ROOM, codes=(0, *_NO_ROOM.codes))}
    refused = Expected(codes=(1,), seconds=_SAVE_SECONDS, says=f"{error}: '.*/c/[^/]*step-")
    maybe = replace(refused, codes=(1, 0), seconds=_GOES_ON.seconds)
    early = replace(refused, seconds=_START_SECONDS)
    if not lasts:
        return maybe, {}
    return maybe, {"start": early, "compile": early}


def rows() -> tuple[Row, ...]:
    """Return the rows about folders and shared memory."""
    found = [row for trouble in _TROUBLES for row in _folder_rows(*trouble)]
    return (*found, *_rows_from_the_start(), *_shared_memory_rows())


def _from_the_start(folder: Folder, change: Change) -> Prepare:
    def prepare(job: Job, dice: random.Random) -> Mapping[str, str]:
        variables = _mounted(folder)(job, dice)
        change(folder, job)
        return variables

    return prepare


def _rows_from_the_start() -> Iterator[Row]:
    """Yield what follows where a folder was unusable before: a save finds out at its first step."""
    refused = Expected(
        codes=(2,), seconds=_SAVE_SECONDS, says="POPRUN_OUTPUT_DIR .*/o: Read-only file system"
    )
    warned = replace(_GOES_ON, says="/o.*No space left on device")
    following = {
        (OUTPUT, "full"): warned,
        (OUTPUT, "read-only"): refused,
        (TEMPORARY, "full"): _NO_ROOM,
        (TEMPORARY, "read-only"): _GOES_ON,
    }
    for title, change, undo, _ in _TROUBLES:
        for folder in (OUTPUT, TEMPORARY):
            yield Row(
                title=f"{folder.title} {title} from the start",
                needs=needs_mounts,
                prepare=_from_the_start(folder, change),
                act=await_start,
                mend=lambda job, folder=folder, undo=undo: undo(folder, job),
                expected=following[folder, title],
            )


def _small_shared_memory(job: Job, dice: random.Random) -> dict[str, str]:
    job.place.sh("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    return {}


def await_start(job: Job, dice: random.Random) -> Done:
    """Wait until the job has started, or has ended; what is to follow is there from the start."""
    at = time.monotonic()
    job.wait_for(lambda: len(job.noted(0)) > 1)
    return Done(at=at, phase="start")


def _shared_memory_rows() -> Iterator[Row]:
    for program, of in ((NUMPY, ""), (POPTORCH, ", a PopTorch model")):
        yield Row(
            title=f"`/dev/shm` of 1 MB{of}",
            program=program,
            needs=needs_mounts,
            prepare=_small_shared_memory,
            act=await_start,
            expected=Expected(codes=(0,), seconds=30),
        )
