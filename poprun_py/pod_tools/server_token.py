"""The token of a pod's server: a file that its owner alone can read.

Nothing here sends or compares it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from popdist_py.atomic_file import beside
from popdist_py.pods.errors import DamagedError, NotAllowedError
from popdist_py.pods.finding import TOKEN

_MOST_CHARACTERS: Final = 4096


def own_token(folder: Path) -> str:
    """Return the token of the pod in ``folder``; the file is made where it is not there.

    Raises:
        NotAllowedError: others can read it.
        DamagedError: it holds no token.
        OSError: it cannot be read or written.
    """
    path = folder / TOKEN
    with contextlib.suppress(FileExistsError):
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path} is no file: remove it, and a new token is made")
        if status.st_mode & 0o077:
            raise NotAllowedError(
                f"others can read or write {path} (mode {stat.S_IMODE(status.st_mode):04o}): "
                "remove it, and a new token is made, or chmod 600 it if nobody has read it"
            )
        token = os.read(descriptor, _MOST_CHARACTERS + 1).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not 16 <= len(token) <= _MOST_CHARACTERS or not all("!" <= one <= "~" for one in token):
        raise DamagedError(
            f"{path} holds no token (at least 16 printable characters, no blanks): remove it, and "
            "a new one is made"
        )
    return token


def _make(path: Path) -> None:
    """Write a new token; a file that is there already is left alone (FileExistsError)."""
    if path.is_symlink() or path.exists():
        raise FileExistsError(path)
    with beside(path, private=True) as partial:
        partial.write_text(secrets.token_urlsafe(32) + "\n", encoding="ascii")
        # Two servers that start at once use the same one: a link does not replace.
        path.hardlink_to(partial)
