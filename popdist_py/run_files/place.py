"""Where the files of this program lie; they are no other process's.

The first process of a program that asks, at ``init()`` at the latest, has them for itself: it marks
the variable with its process id, so that what it starts or forks afterwards does not write a second
time.
Nothing here writes.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from popdist_py.environment import RUN_FILES

__all__ = ["begin", "claim", "run_file"]

# Who asked first in this process or the one that it was forked from, and what the paths begin with.
_owner: tuple[int, str] | None = None


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


def begin() -> None:
    """Have the files for this process, unless another one of the program has them."""
    global _owner
    if _owner is None:
        process = os.getpid()
        _owner = process, claim(os.environ, process)


def run_file(name: str) -> Path | None:
    """Return the path of a file that this program leaves; None where none is wanted."""
    begin()
    process, prefix = _owner or (0, "")
    return Path(f"{prefix}.{name}") if prefix and os.getpid() == process else None
