"""A launcher's folders: for its socket and mpirun's files, and for memory that instances share.

Their name holds the launcher's process id, by which ``--stacks`` finds them. Who may remove them,
and when: ``instance/job_folders.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from poprun_py.errors import StartError
from poprun_py.instance.job_folders import (
    SHARED_MEMORY,
    JobFolder,
    folder_locations,
    folder_name,
    memory_folder_name,
    remove_abandoned,
)

SOCKET_NAME = "control"
ANY_FOLDER = "poprun-*"
# The longest path of a Unix socket is 107 bytes.
_LONGEST_BASE = 60
# MPI needs some megabytes for a job; less than this was left by something that wrote until the end.
_NO_ROOM_BYTES = 1 << 20


def folder_prefix(pid: int) -> str:
    """Return what the name of the folder of launcher ``pid`` begins with."""
    return f"poprun-{pid}-"


def make_private_folder() -> JobFolder:
    """Make a folder for temporary files that only this user can enter.

    Raises:
        StartError: No such folder can be made.
    """
    bases = _bases()
    for base in bases:
        with contextlib.suppress(OSError):
            return JobFolder.make(base, folder_name(str(os.getpid())))
    raise StartError(f"no folder for temporary files can be made in {bases[0]}")


def make_memory_folder(private: Path, token: str) -> JobFolder | None:
    """Make the folder in memory of a job on this host; None where none can be.

    Args:
        private: The launcher's folder.
        token: What instances that are reached by the network know; empty where none are.
    """
    with contextlib.suppress(OSError):
        name = memory_folder_name(token) if token else private.name
        return JobFolder.make(SHARED_MEMORY, name)
    return None


def remove_folder_of(pid: int) -> None:
    """Remove the folders that launcher ``pid``, which was killed, could not remove itself.

    Where wrappers are left, the last of them does.
    """
    remove_abandoned(folder_locations(), pid)


def _bases() -> list[str]:
    """Return where such a folder may be made, the user's choice first."""
    bases = (os.environ.get("TMPDIR", ""), "/tmp")
    return [base for base in bases if base and len(base) < _LONGEST_BASE]


def is_full(folder: Path) -> bool:
    """Whether the file system of ``folder`` takes no further file: no room, or read-only by now."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    # Some file systems have no limits: they say 0 of 0.
    has_no_names = status.f_files > 0 and status.f_favail == 0
    has_no_bytes = status.f_blocks > 0 and status.f_bavail * status.f_frsize < _NO_ROOM_BYTES
    return has_no_names or has_no_bytes or bool(status.f_flag & os.ST_RDONLY)


def mpirun_files_in(
    folder: Path, command: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make mpirun of Open MPI 5 keep its files here in ``folder``.

    By default they lie in ``$TMPDIR/ompi.<its process id>``. A killed mpirun leaves that folder,
    and a later one that happens to get the same process id refuses to start ("The PMIx server's
    listener thread failed to start"). Here they go with the launcher's folder. A place that the
    user chose, on the command line or in a variable, stays.
    """
    if any("tmpdir_base" in word for word in (*command, *environ)):
        return {}
    return {"PRTE_MCA_prte_local_tmpdir_base": str(folder)}
