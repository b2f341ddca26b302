"""Files that other processes see whole or not at all: written beside their place, then renamed.

What stands in a file, and whether it must survive a power failure, is the caller's matter.
Standard library only.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PARTIAL_SUFFIX", "replaced_at_end"]

# A writer that is killed leaves a file ``.NAME.*.partial`` behind.
PARTIAL_SUFFIX = ".partial"


@contextmanager
def replaced_at_end(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes the place of ``path`` if the block raises nothing.

    The folder must exist. Several processes may write the same file; the last one wins.

    Raises:
        OSError: the file cannot be renamed; ``path`` is as it was.
    """
    # Processes on several hosts may share the folder, so the process id alone is not unique.
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}.{unique}{PARTIAL_SUFFIX}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
