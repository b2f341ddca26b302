"""Rows about limits of processes, and about a clock that jumps.

Limits of the number of processes and of memory are control groups of the case's own. The clock of
the machine is never changed: a library in front of the C library tells the processes of a case
another time.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tools.soak.jobs import Job
from tools.soak.kills import await_failure, drawn_failure, reach
from tools.soak.program import PHASES
from tools.soak.resources import await_start
from tools.soak.rows import Act, Done, Expected, Prepare, Row

_GROUPS = Path("/sys/fs/cgroup")
_ENTER = ("sh", "-c", 'echo $$ > "$SOAK_GROUP/cgroup.procs" && exec "$@"', "sh")
_MEMORY = 300 << 20
_CLOCK = Path(__file__).with_name("moved_clock.c")
_HOUR = 3600
_GOES_ON = Expected(codes=(0,), seconds=20)


# --- control groups -------------------------------------------------------------------------


@functools.cache
def _base(controller: str) -> Path | None:
    """Return where groups with a controller can be made, for either version of control groups."""
    for base in (_GROUPS / controller, _GROUPS):
        limit = _limit_of(controller, base)
        probe = base / f"soak-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        exists = (probe / limit).exists()
        probe.rmdir()
        if exists:
            return base
    return None


def _limit_of(controller: str, base: Path) -> str:
    """Return the file of a group that has its limit."""
    if controller == "pids":
        return "pids.max"
    return "memory.max" if base == _GROUPS else "memory.limit_in_bytes"


def _needs_group(controller: str) -> Callable[[], str]:
    def needs() -> str:
        return "" if _base(controller) else f"no control group of {controller} can be made here"

    return needs


def _grouped(controller: str, limits: Sequence[int], prepare: Prepare | None = None) -> Prepare:
    """Have the job run in a group of its own, with a limit that is drawn."""

    def prepared(job: Job, dice: random.Random) -> dict[str, str]:
        base = _base(controller)
        assert base is not None
        group = base / f"soak-{os.getpid()}-{job.folder.name}"
        group.mkdir()
        job.place.at_close(group.rmdir)
        (group / _limit_of(controller, base)).write_text(str(dice.choice(limits)))
        more = prepare(job, dice) if prepare is not None else {}
        return {"SOAK_GROUP": str(group), **more}

    return prepared


# --- the clock ------------------------------------------------------------------------------


def clock_library(folder: Path) -> Path:
    """Compile the library that tells a process another time, which takes some milliseconds.

    Raises:
        subprocess.CalledProcessError: the compiler fails.
    """
    library = folder / "moved_clock.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, _CLOCK]
    subprocess.run(command, check=True, capture_output=True)
    return library


def move_clock(clock: Path, seconds: int) -> None:
    """Move the time of the processes whose ``SOAK_CLOCK`` is ``clock``; the file is mapped."""
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, "little", signed=True))


def _own_clock(job: Job, dice: random.Random) -> dict[str, str]:
    clock = job.folder / "clock"
    move_clock(clock, 0)
    return {"LD_PRELOAD": str(clock_library(job.folder)), "SOAK_CLOCK": str(clock)}


def _jump(seconds: int) -> Act:
    """Move the clock at a drawn moment."""

    def act(job: Job, dice: random.Random) -> Done:
        phase, instance = dice.choice(PHASES), dice.randrange(job.place.num_instances)
        missed = reach(job, dice, "program", phase, instance) is None
        move_clock(job.folder / "clock", seconds)
        return Done(at=time.monotonic(), phase=job.phase(instance), missed=missed)

    return act


# --- rows -----------------------------------------------------------------------------------


def rows() -> tuple[Row, ...]:
    """Return the rows about limits and the clock."""
    return (*_limit_rows(), *_clock_rows())


def _limit_rows() -> Iterator[Row]:
    yield Row(
        title="64 descriptors",
        act=await_start,
        before=("prlimit", "--nofile=64:64"),
        expected=Expected(codes=(0,), seconds=20),
    )
    yield Row(
        title="32 descriptors",
        act=await_start,
        before=("prlimit", "--nofile=32:32"),
        expected=Expected(
            codes=(3,),
            seconds=4,
            says="need 40 open files, and the hard limit is 32: raise the limit",
        ),
    )
    yield Row(
        title="2 to 10 processes and threads",
        needs=_needs_group("pids"),
        prepare=_grouped("pids", range(2, 11)),
        act=await_start,
        before=_ENTER,
        # The last are refused to a program or to MPI in it, which says so in its own way.
        expected=Expected(codes=(3, 1, 14), seconds=8, says=r"limit of \d+ processes and threads"),
    )
    yield Row(
        title="20 processes",
        needs=_needs_group("pids"),
        prepare=_grouped("pids", (20,)),
        act=await_start,
        before=_ENTER,
        expected=Expected(codes=(0,), seconds=20),
    )
    yield Row(
        title="the memory limit is hit",
        needs=_needs_group("memory"),
        prepare=_grouped("memory", (_MEMORY,), drawn_failure("fill_memory")),
        act=await_failure,
        before=_ENTER,
        expected=Expected(
            codes=(137,),
            seconds=4,
            names=True,
            says="out of memory: the kernel killed the instance",
        ),
    )


def _clock_rows() -> Iterator[Row]:
    for title, seconds in (("forward", _HOUR), ("back", -_HOUR)):
        yield Row(
            title=f"the clock jumps an hour {title}",
            needs=lambda: "" if shutil.which("cc") else "there is no C compiler, cc",
            prepare=_own_clock,
            act=_jump(seconds),
            options=("--hang-timeout", "5", "--timeout", "60"),
            expected=_GOES_ON,
        )
