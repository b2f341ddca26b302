"""Files that others see whole or not at all: written beside their place, then renamed.

The launcher's own, since of the library it reaches only the wire. What stands in a file is the
caller's matter.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step; its folder is made if it is not there.

    Raises:
        OSError: it cannot be written; ``path`` is as it was, and nothing lies beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Launchers on several hosts may share the folder: a process id alone is not unique.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
