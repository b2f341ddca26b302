"""Paths of the files in a run's folder that only one process of a program writes.

The first process that asks for a path, or that calls ``init()``, becomes the writer of the files.
The writer adds its process id to the environment variable POPDIST_RUN_FILES. A child process finds
another process's id in POPDIST_RUN_FILES, so the child process does not write files.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from popdist_py.environment import RUN_FILES

# The process id and the path prefix of the first ``begin()`` call, in this process or before a
# fork.
_owner: tuple[int, str] | None = None


def claim(environ: MutableMapping[str, str], process: int) -> str:
    """Return the path prefix of a process's files, or an empty text if it may not write files.

    Args:
        environ: The environment of the process. If ``process`` becomes the writer of the files, its
            id is added to POPDIST_RUN_FILES.
        process: The id of the process.
    """
    given = environ.get(RUN_FILES, "")
    if given.startswith("/"):
        environ[RUN_FILES] = f"{process}:{given}"
        return given
    owner, _, prefix = given.partition(":")
    # A program that replaces itself with exec keeps its process id, so it may continue to write.
    return prefix if owner == str(process) else ""


def begin() -> None:
    """Make this process the writer of the files, unless another process of the program is."""
    global _owner
    if _owner is None:
        process = os.getpid()
        _owner = process, claim(os.environ, process)


def run_file(name: str) -> Path | None:
    """Return the path of a file to write, or None if this process does not write files."""
    begin()
    process, prefix = _owner or (0, "")
    return Path(f"{prefix}.{name}") if prefix and os.getpid() == process else None
