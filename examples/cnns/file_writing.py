"""Files that only their owner can read, and files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["private", "replaced_at_end"]


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Create all files with mode 0600 and all folders with mode 0700 inside the block."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def replaced_at_end(path: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces ``path`` when the block ends without an error.

    If several instances replace the same file, the file of the last instance is kept.

    Raises:
        OSError: The file cannot be written; ``path`` is unchanged.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as beside:
        partial = Path(beside, path.name)
        yield partial
        partial.replace(path)
