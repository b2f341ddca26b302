"""Files that other processes see complete or not at all, and files that only their owner can read.

A file is written beside its place and then renamed. It is not synchronised to the disk. The
launcher uses these functions too. Standard library only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

__all__ = ["PARTIAL_SUFFIX", "beside", "open_private", "replaced_at_end", "write_whole"]

# A writer that is killed leaves a file ``.NAME.*.partial`` behind.
PARTIAL_SUFFIX = ".partial"


@contextmanager
def beside(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield the path of a file beside ``path`` that no other process uses; it is gone afterwards.

    Args:
        path: in whose folder, which must exist.
        private: make the file at once, so that only its owner can read it.

    Raises:
        OSError: it cannot be made.
    """
    # Processes on several hosts may share the folder, so the process id alone is not unique.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        if private:
            partial.touch(0o600, exist_ok=False)
        yield partial
    except BaseException:
        # A file system that has become read-only refuses this as well: the first error counts.
        with suppress(OSError):
            partial.unlink()
        raise
    partial.unlink(missing_ok=True)


@contextmanager
def replaced_at_end(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a path to write to; the file takes the place of ``path`` if the block raises nothing.

    Several processes may write the same file; the last one wins. The arguments are those of
    ``beside``.

    Raises:
        OSError: the file cannot be made or renamed; ``path`` is as it was.
    """
    with beside(path, private=private) as partial:
        yield partial
        partial.replace(path)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step, into a folder that is there.

    Only the owner of the file can read it. Bytes that are not UTF-8 are written as escapes,
    in the way of stderr.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: it cannot be written; ``path`` is as it was, and nothing lies beside it.
    """
    if not path.parent.exists():
        # The name of the file beside it would tell nobody anything.
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}")
    with replaced_at_end(path, private=True) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def open_private(path: Path, mode: Literal["wb", "ab"], *, buffering: int = -1) -> BinaryIO:
    """Open a file to write it or to append to it. If it is new, only its owner can read it.

    The arguments are those of ``open``.

    Raises:
        OSError: The file cannot be opened.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    return open(path, mode, buffering, opener=opener)
