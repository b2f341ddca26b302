"""The paths of this program's files, which only one process of the program writes.

The first process that asks for a path, or that calls ``init()``, claims the files. The process that
claims the files adds its process id to the environment variable POPDIST_RUN_FILES. A child process
finds the id of another process in the variable, so the child process does not write files.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from popdist_py.environment import RUN_FILES

# The id of the process that called ``claim``, here or before a fork, and the prefix of its paths.
_owner: tuple[int, str] | None = None


def claim(environ: MutableMapping[str, str], process: int) -> str:
    """Return the prefix of a process's paths, or an empty text if the process writes no files.

    Args:
        environ: The environment of the process. A successful claim changes the variable.
        process: The id of the process.
    """
    given = environ.get(RUN_FILES, "")
    if given.startswith("/"):
        environ[RUN_FILES] = f"{process}:{given}"
        return given
    owner, _, prefix = given.partition(":")
    # A program that replaces itself with exec keeps its process id.
    return prefix if owner == str(process) else ""


def begin() -> None:
    """Claim the files for this process, unless another process of the program has claimed them."""
    global _owner
    if _owner is None:
        process = os.getpid()
        _owner = process, claim(os.environ, process)


def run_file(name: str) -> Path | None:
    """Return the path of a file of this process, or None if this process does not write files."""
    begin()
    process, prefix = _owner or (0, "")
    return Path(f"{prefix}.{name}") if prefix and os.getpid() == process else None
