"""The launcher's temporary folders, for its socket, mpirun's files, and shared memory.

Their names contain the launcher's process id, so that ``--stacks`` finds them.
``instance/job_folders.py`` decides which process removes them, and when.
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
# The path of a Unix socket has at most 107 bytes.
_MAX_BASE_LENGTH = 60


def folder_prefix(pid: int) -> str:
    """Return the beginning of the folder names of launcher ``pid``."""
    return f"poprun-{pid}-"


def make_launcher_folder() -> JobFolder:
    """Make a folder for temporary files that only this user can enter.

    Raises:
        StartError: The folder cannot be made.
    """
    bases = [os.environ.get("TMPDIR", ""), "/tmp"]
    bases = [base for base in bases if base and len(base) < _MAX_BASE_LENGTH]
    for base in bases:
        with contextlib.suppress(OSError):
            return JobFolder.make(base, folder_name(str(os.getpid())))
    raise StartError(f"no folder for temporary files can be made in {bases[0]}")


def make_shared_memory_folder(private: Path, token: str) -> JobFolder | None:
    """Make the folder of a job in this host's shared memory; return None if that is impossible.

    The ``token`` is the one of the control channel, if the job has other hosts; otherwise empty.
    """
    with contextlib.suppress(OSError):
        name = memory_folder_name(token) if token else private.name
        return JobFolder.make(SHARED_MEMORY, name)
    return None


def remove_launcher_folders(pid: int) -> None:
    """Remove the folders of launcher ``pid``, which was killed.

    If any of its wrappers is still running, the last of them removes the folders instead.
    """
    remove_abandoned(folder_locations(), pid)


def mpirun_folder_variables(
    folder: Path, command: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make Open MPI 5 keep its files on this host in ``folder``.

    By default, Open MPI keeps them in ``$TMPDIR/ompi.<its process id>``. A killed mpirun leaves
    that folder behind, and a later mpirun with the same process id refuses to start ("The PMIx
    server's listener thread failed to start"). Files in the launcher's folder are removed together
    with that folder. If the user chose a folder for Open MPI's files, on the command line or in a
    variable, the result is empty.
    """
    if any("tmpdir_base" in word for word in (*command, *environ)):
        return {}
    return {"PRTE_MCA_prte_local_tmpdir_base": str(folder)}
