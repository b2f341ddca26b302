"""Seals of files. A seal is a digest, stored before a file's content, that detects damage.

    mark | BLAKE2b digest of the content, 32 bytes | content

A seal does not detect forgery. ``owner.py`` checks which users can have written a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

_MARK = b"popdist sealed 1\n"
_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


class _Content:
    """A file for writing that computes the digest of the written data."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = _new_digest()
        self._problem: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write data, and return the number of written bytes."""
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._problem = error
            raise

    def flush(self) -> None:
        """Flush the buffer of the file."""
        self._file.flush()

    def _seal(self) -> None:
        self._file.seek(len(_MARK))
        self._file.write(self._digest.digest())


@contextmanager
def sealed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a file for the content, and write the seal at the end of the ``with`` block.

    Args:
        file: An empty file that is open for writing.

    Raises:
        OSError: The file cannot be written. If the failed write makes the ``with`` block raise
            another error, this error is raised instead.
    """
    file.write(_MARK + bytes(_DIGEST_BYTES))
    content = _Content(file)
    try:
        yield cast("IO[bytes]", content)  # torch.save() uses only write() and flush()
    except Exception:
        # On a full disk, torch.save() raises a misleading error about an unexpected file position.
        if content._problem is not None:
            raise content._problem from None
        raise
    content._seal()


def is_sealed(file: IO[bytes]) -> bool | None:
    """Return whether a file is undamaged, and seek to the beginning of its content.

    Args:
        file: A file that is open for reading, at its beginning.

    Returns:
        None if the file does not have a seal. A file without a seal contains only the content.
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
