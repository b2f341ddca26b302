"""The launcher's temporary folders for the control socket, mpirun's files, and shared memory.

The name of the socket's folder contains the launcher's process id, so that ``--stacks`` finds the
folder. ``instance/job_folders.py`` decides which process removes the folders, and when.
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
# The path of a Unix socket has at most 107 bytes, so the folder's path must be short.
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
    raise StartError(f"cannot make a folder for temporary files in {bases[0]}")


def make_shared_memory_folder(private: Path, token: str) -> JobFolder | None:
    """Make the folder of a job in this host's shared memory; return None if that is impossible.

    If the job has other hosts, ``token`` is the control channel's token; otherwise it is empty.
    """
    with contextlib.suppress(OSError):
        name = memory_folder_name(token) if token else private.name
        return JobFolder.make(SHARED_MEMORY, name)
    return None


def remove_launcher_folders(pid: int) -> None:
    """Remove the folders of launcher ``pid``, which was killed.

    If wrappers of this launcher still run, the last wrapper removes the folders instead.
    """
    remove_abandoned(folder_locations(), pid)


def mpirun_folder_variables(
    folder: Path, command: tuple[str, ...], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return environment variables that make Open MPI 5 keep this host's files in ``folder``.

    By default, Open MPI keeps its files in ``$TMPDIR/ompi.<PID of mpirun>``. A killed mpirun leaves
    that folder behind, and a later mpirun with the same process id refuses to start ("The PMIx
    server's listener thread failed to start"). Files in the launcher's folder are removed together
    with the launcher's folder. If the user chose a folder for Open MPI's files, on the command line
    or in a variable, the result is empty.
    """
    if any("tmpdir_base" in word for word in (*command, *environ)):
        return {}
    return {"PRTE_MCA_prte_local_tmpdir_base": str(folder)}
