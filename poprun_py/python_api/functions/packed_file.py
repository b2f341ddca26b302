"""Files that hold one pickled value each, in a format of this library.

    index length | JSON index | pickle | buffers of arrays | CRC-32 | mark

Every part of a file before the CRC-32 begins at a multiple of 64 bytes. Arrays are written directly
from memory and read by mapping the file, so the writer and the reader copy no arrays. The CRC-32
covers all preceding bytes of the file. A file is refused if it is incomplete, changed, or writable
by other users. New files have mode 0600.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from popdist_py.atomic_file import replaced_at_end
from popdist_py.own_files.owner import NotOwnFileError, check_own

# The alignment of a file's parts in bytes, like the memory alignment of NumPy and torch.
_ALIGNMENT = 64
# Files below 1 MiB are read, not mapped, because each mapping keeps a descriptor open.
_LEAST_MAPPED_BYTES = 1 << 20
_MARK = b"\x93poprun3"
# The binary formats of the index's length, and of the CRC-32 with the mark.
_LENGTH = struct.Struct(">Q")
_END = struct.Struct(f">I{len(_MARK)}s")


class IncompleteFileError(Exception):
    """The file is missing, incomplete or changed, or other users can write to it."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """An opened file that holds one pickled value.

    Attributes:
        head: Metadata of the value, which can be read without unpickling it.
    """

    head: dict[str, Any]
    _stream: memoryview
    _buffers: tuple[memoryview, ...]

    def load(self) -> Any:
        """Return the value.

        Changing an array in the value does not change the file, and removing the file does not
        affect the array.

        Raises:
            Exception: Any exception that unpickling raises.
        """
        return pickle.loads(self._stream, buffers=self._buffers)


def write_packed(
    path: Path, head: dict[str, Any], parts: Sequence[Sequence[bytes | memoryview]]
) -> None:
    """Write a packed file atomically, so that other processes never see an incomplete file.

    ``head`` is metadata of the value, as JSON. ``parts`` is the return value of
    ``pickled``.

    Raises:
        OSError: The file cannot be written.
    """
    sizes = [sum(map(len, chunks)) for chunks in parts]
    index = json.dumps({"head": head, "sizes": sizes}).encode()
    crc = 0
    with replaced_at_end(path, private=True) as partial, partial.open("wb") as file:
        for chunks in ([_LENGTH.pack(len(index))], [index], *parts):
            padding = bytes(-sum(map(len, chunks)) % _ALIGNMENT)
            for chunk in (*chunks, padding):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
        file.write(_END.pack(crc, _MARK))


def open_packed(path: Path) -> PackedFile:
    """Open a file that ``write_packed`` has written, and check its owner and its CRC-32.

    Raises:
        IncompleteFileError: The file is missing, incomplete or changed, or other users can write
            to it.
    """
    try:
        with path.open("rb") as file:
            # The job's folder needs no check, because only this user can enter it.
            check_own(file.fileno(), path)
            pages = memoryview(_pages(file))
    except (OSError, NotOwnFileError) as error:
        raise IncompleteFileError(str(error)) from None
    end = len(pages) - _END.size
    if end < _LENGTH.size or _END.unpack_from(pages, end) != (zlib.crc32(pages[:end]), _MARK):
        raise IncompleteFileError(f"the file {path} is incomplete or was changed")
    (length,) = _LENGTH.unpack_from(pages)
    begin = _ALIGNMENT
    index = json.loads(bytes(pages[begin : begin + length]))
    parts = []
    for size in (length, *index["sizes"]):
        parts.append(pages[begin : begin + size])
        begin += size + -size % _ALIGNMENT
    _, stream, *buffers = parts
    return PackedFile(index["head"], stream, tuple(buffers))


def _pages(file: IO[bytes]) -> mmap.mmap:
    """Return a file's content by mapping a large file, or by reading a small file."""
    size = os.fstat(file.fileno()).st_size
    if size < _LEAST_MAPPED_BYTES:
        pages = mmap.mmap(-1, max(1, size))
        pages.write(file.read())
        return pages
    if sys.version_info >= (3, 13):
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
