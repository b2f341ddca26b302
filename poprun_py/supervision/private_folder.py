"""The folder that holds a launcher's socket: where it is, and who may enter it.

Its name holds the launcher's process id, by which ``--stacks`` finds it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from poprun_py.errors import StartError

__all__ = ["SOCKET_NAME", "folder_prefix", "make_private_folder"]

SOCKET_NAME = "control"
# The longest path of a Unix socket is 107 bytes.
_LONGEST_BASE = 60


def folder_prefix(pid: int) -> str:
    """Return what the name of the folder of launcher ``pid`` begins with."""
    return f"poprun-{pid}-"


def make_private_folder() -> Path:
    """Make a folder for temporary files that only this user can enter.

    What tempfile does, without its imports: they take longer than a launch may add to mpirun.

    Raises:
        StartError: no such folder can be made.
    """
    bases = [os.environ.get("TMPDIR", ""), "/tmp"]
    for base in (base for base in bases if base and len(base) < _LONGEST_BASE):
        folder = Path(base, f"{folder_prefix(os.getpid())}{os.urandom(6).hex()}").absolute()
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
            return folder
    raise StartError(f"no folder for temporary files can be made in {bases[0] or '/tmp'}")
