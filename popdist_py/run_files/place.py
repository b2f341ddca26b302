"""Where the files of this program lie; they are no other process's.

The first process of a program that asks has them for itself: it marks the variable with its process
id, so that what it starts or forks afterwards does not write a second time.
Nothing here writes.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from popdist_py.environment import RUN_FILES

__all__ = ["claim", "run_file"]


def claim(environ: MutableMapping[str, str], process: int) -> str:
    """Return what the paths of a process's files begin with; empty if it has none.

    Args:
        environ: its environment, which is marked for those that it starts.
        process: its id.
    """
    given = environ.get(RUN_FILES, "")
    if given.startswith("/"):
        environ[RUN_FILES] = f"{process}:{given}"
        return given
    owner, _, prefix = given.partition(":")
    # A program that replaces itself by another one (exec) stays the same process.
    return prefix if owner == str(process) else ""


def run_file(name: str) -> Path | None:
    """Return the path of a file that this program leaves; None where none is wanted."""
    return Path(f"{_prefix}.{name}") if _prefix and os.getpid() == _process else None


_process = os.getpid()
_prefix = claim(os.environ, _process)
