"""Files that others see whole or not at all: written beside their place, then renamed.

The launcher's own, since of the library it reaches only the wire. What stands in a file is the
caller's matter.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step; its folder is made if it is not there.

    Only the owner of the file can read it.

    Raises:
        OSError: it cannot be written; ``path`` is as it was, and nothing lies beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Launchers on several hosts may share the folder: a process id alone is not unique.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
