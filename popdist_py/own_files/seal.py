"""A seal in front of a file's content: whether it is as it was written, to the last byte.

    mark | BLAKE2b of all that follows, 32 bytes | content

A seal tells of damage, not of forgery: who may have written a file is owner.py's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

__all__ = ["is_sealed", "sealed"]

_MARK = b"popdist sealed 1\n"
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class _Content:
    """What is written through this, from its beginning to its end, is under the seal."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = _new_digest()
        self._problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write more; returns how many bytes that was."""
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._problem = error
            raise

    def flush(self) -> None:
        """Let the file's buffer go."""
        self._file.flush()

    def _seal(self) -> None:
        self._file.seek(len(_MARK))
        self._file.write(self._digest.digest())


@contextmanager
def sealed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield what to write the content through; the seal is whole when the block has ended.

    Args:
        file: open for writing, and empty.

    Raises:
        OSError: it cannot be written, whatever the writer in the block made of that.
    """
    file.write(_MARK + bytes(_DIGEST_BYTES))
    content = _Content(file)
    try:
        yield cast("IO[bytes]", content)  # of which torch.save() writes and flushes
    except Exception:
        # torch.save() speaks of an unexpected position where the disk is full.
        if content._problem is not None:
            raise content._problem from None
        raise
    content._seal()


def is_sealed(file: IO[bytes]) -> bool | None:
    """Tell whether a file is as it was written, and go to the beginning of its content.

    Args:
        file: open for reading, at its beginning.

    Returns:
        None if it has no seal; then it is at its beginning again.
    """
    if file.read(len(_MARK)) != _MARK:
        file.seek(0)
        return None
    expected, digest = file.read(_DIGEST_BYTES), _new_digest()
    begin = file.tell()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    file.seek(begin, os.SEEK_SET)
    return digest.digest() == expected


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)
