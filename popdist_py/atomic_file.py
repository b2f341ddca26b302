"""Functions that write a file so that other processes see it complete or not at all.

A file is written under a temporary name and then renamed. The functions of this module do not call
``fsync``, so a power failure may lose a new file. The function ``open_private`` opens files that
only their owner can read. The launcher uses this module too, so it imports only the standard
library.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

# The suffix of temporary files. A killed writer leaves a file ``.NAME.*.partial`` behind.
PARTIAL_SUFFIX = ".partial"


@contextmanager
def beside(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, and finally remove the temporary file.

    Args:
        path: A path in an existing folder.
        private: Whether to create the temporary file at once, readable only by its owner.

    Raises:
        OSError: The temporary file cannot be created.
    """
    # Processes on several hosts may share the folder, so a process id does not make the name
    # unique.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        if private:
            partial.touch(0o600, exist_ok=False)
        yield partial
    except BaseException:
        # If the file system has become read-only, unlink() raises a second error, which must not
        # hide the first one.
        with suppress(OSError):
            partial.unlink()
        raise
    partial.unlink(missing_ok=True)


@contextmanager
def replaced_at_end(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path, and rename the file there to ``path`` if the ``with`` block succeeds.

    If several processes write the same file, the last process wins. The arguments are the same as
    for ``beside``.

    Raises:
        OSError: The temporary file cannot be created or renamed. The file at ``path`` is unchanged
            after this error.
    """
    with beside(path, private=private) as partial:
        yield partial
        partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. The folder of ``path`` must exist.

    The written file can be read only by its owner. Characters that UTF-8 cannot encode are written
    as backslash escapes.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: The file cannot be written. After this error, the file at ``path`` is unchanged,
            and no temporary file remains.
    """
    if not path.parent.exists():
        # Without this check, the error would name the temporary file, which the user does not know.
        raise FileNotFoundError(errno.ENOENT, f"the folder {path.parent} does not exist")
    with replaced_at_end(path, private=True) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def holds_another_kind(path: Path, beginnings: tuple[bytes, ...]) -> bool:
    """Return whether a file exists, is not empty, and begins with none of ``beginnings``.

    Spaces and empty lines before the beginning are ignored. For a file that cannot be read, the
    result is False: the later attempt to write the file reports the error.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            beginning = file.read(64).lstrip()
    except OSError:
        return False
    return bool(beginning) and not beginning.startswith(beginnings)


def open_private(path: Path, mode: Literal["wb", "ab"], *, buffering: int = -1) -> BinaryIO:
    """Open a file for writing or appending. If the file is new, only its owner can read it.

    The arguments are the same as for ``open``.

    Raises:
        OSError: The file cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, mode, buffering, opener=opener)
