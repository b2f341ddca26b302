"""The state of a run: its report.json, and whether the launcher of the run is alive."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py import process_info

# The launcher of a running job writes an observation of the job at least this often, except after
# very long runs.
_SIGN_OF_LIFE_SECONDS: Final = 120.0
# The clock of a launcher may differ from the kernel's clock by this much.
_CLOCK_SECONDS: Final = 5.0


class RunState(enum.StrEnum):
    """The states of a run.

    ``INTERRUPTED`` is a run that a signal ended or that stopped at a checkpoint. ``LOST`` is a run
    whose launcher was killed before it could write the end of the run. ``UNKNOWN`` is a run whose
    report cannot be read, or that another host launched and that shows no sign of life.
    """

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Liveness:
    """Facts that tell whether the launcher of a run is alive.

    Attributes:
        is_locked: Whether a process holds the lock of the run's folder.
        is_of_this_host: Whether the launcher ran on this host.
        is_process_alive: Whether this host has a process with the launcher's process id, which is
            as old as the run.
        silent_seconds: The time since the files of the run were last written.
    """

    is_locked: bool = False
    is_of_this_host: bool = True
    is_process_alive: bool = False
    silent_seconds: float = 0.0


def ended_state(report: Mapping[str, Any]) -> RunState:
    """Return the state of a run whose report contains the end of the run."""
    code = report.get("exit_code")
    attempts = report.get("attempts") or [{}]
    if code == 0:
        return RunState.FINISHED
    if code == RESUME_EXIT_CODE or attempts[-1].get("cause") == "signal":
        return RunState.INTERRUPTED
    return RunState.FAILED


def unended_state(facts: Liveness) -> RunState:
    """Return the state of a run whose report does not contain the end of the run.

    On some file systems folders cannot be locked. There the launcher's process decides or, on other
    hosts, the time since the files of the run were written.
    """
    if facts.is_locked:
        return RunState.RUNNING
    if facts.is_of_this_host:
        return RunState.RUNNING if facts.is_process_alive else RunState.LOST
    is_alive = facts.silent_seconds < _SIGN_OF_LIFE_SECONDS
    return RunState.RUNNING if is_alive else RunState.UNKNOWN


def read_liveness(folder: Path, launcher: object, age: float, written_at: float) -> Liveness:
    """Return the facts about the launcher of the run in ``folder``.

    Args:
        folder: The folder of the run.
        launcher: The host and the process id of the launcher, from the report.
        age: The seconds since the last attempt of the run began.
        written_at: The time of the last change of the run's files, in seconds since the epoch.
    """
    known = launcher if isinstance(launcher, dict) else {}
    return Liveness(
        is_locked=is_locked(folder),
        is_of_this_host=known.get("host") == os.uname().nodename,
        is_process_alive=_is_alive(known.get("pid"), age),
        silent_seconds=time.time() - written_at,
    )


def is_locked(folder: Path) -> bool:
    """Return whether a launcher holds the lock of a run's folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _is_alive(pid: object, age: float) -> bool:
    """Return whether a process is alive, and is not a younger process with the same id."""
    ticks = process_info.start_ticks(pid) if isinstance(pid, int) and pid > 0 else None
    if ticks is None:
        return False
    started = ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started + _CLOCK_SECONDS >= age
