"""Files that hold one pickled value each, in a format of this library.

    pickle | buffers, each at a multiple of 64 bytes | JSON index | index length | CRC-32 | mark

Arrays are written directly from their memory and read by mapping the file, so neither process
copies them. The CRC-32 covers all preceding bytes of the file. A file is refused if it is
incomplete, changed, or writable by other users. New files have mode 0600.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from popdist_py.atomic_file import open_private
from popdist_py.own_files.owner import NotOwnFileError, check_own

# The alignment of buffers in bytes, the same as NumPy and torch use for their own memory.
_ALIGNMENT = 64
# Files below this size are read, not mapped, because each mapping keeps a descriptor open.
_LEAST_MAPPED_BYTES = 1 << 20
_MARK = b"\x93poprun2"
# The formats of the index's length, and of the last bytes of a file: the CRC-32 and the mark.
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

        Arrays in the value are private copy-on-write pages of the file. The arrays can be changed,
        and stay valid when the file is removed.

        Raises:
            Exception: Any exception that unpickling raises.
        """
        return pickle.loads(self._stream, buffers=self._buffers)


def write_packed(path: Path, head: dict[str, Any], value: object) -> None:
    """Write a packed file atomically, so that other processes never see an incomplete file.

    Raises:
        OSError: The file cannot be written.
        Exception: Any exception that pickling the value raises.
    """
    from poprun_py.python_api.functions.pickling import pickle_into

    partial = path.with_name(f".{path.name}.partial")
    try:
        with create(partial) as file:
            append_buffers(file, head, pickle_into(file, value))
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


class ChecksummedFile:
    """A file that is written sequentially, with the size and CRC-32 of the bytes so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes at the end of the file, and return the number of bytes written."""
        written = self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.size += written
        return written


@contextmanager
def create(path: Path) -> Iterator[ChecksummedFile]:
    """Open a new file that only its owner can read, and close it after ``with``.

    Raises:
        OSError: The file cannot be created.
    """
    with open_private(path, "wb") as file:
        yield ChecksummedFile(file)


def append_buffers(
    file: ChecksummedFile, head: dict[str, Any], buffers: Sequence[pickle.PickleBuffer]
) -> None:
    """Write the buffers, index, CRC-32 and mark that follow the pickle in a file."""
    pickle_bytes = file.size
    places = []
    for buffer in buffers:
        file.write(bytes(-file.size % _ALIGNMENT))
        with buffer.raw() as raw:
            places.append((file.size, raw.nbytes))
            file.write(raw)
    index = json.dumps({"head": head, "pickle": pickle_bytes, "buffers": places}).encode()
    file.write(index + _LENGTH.pack(len(index)))
    file.write(_END.pack(file.crc, _MARK))


def open_packed(path: Path) -> PackedFile:
    """Open a file that ``append_buffers`` has finished, and check its owner and its CRC-32.

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
    index = _index(pages)
    if index is None:
        raise IncompleteFileError(f"{path} is incomplete, or was changed")
    return PackedFile(
        index["head"],
        pages[: index["pickle"]],
        tuple(pages[begin : begin + size] for begin, size in index["buffers"]),
    )


def _pages(file: IO[bytes]) -> mmap.mmap:
    """Return the content of a file. A large file is mapped, and a small one is read into memory."""
    size = os.fstat(file.fileno()).st_size
    if size < _LEAST_MAPPED_BYTES:
        pages = mmap.mmap(-1, max(1, size))
        pages.write(file.read())
        return pages
    if sys.version_info >= (3, 13):
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def _index(pages: memoryview) -> dict[str, Any] | None:
    """Return the index of a file; None if the file is incomplete or changed."""
    crc_begin = len(pages) - _END.size
    end = crc_begin - _LENGTH.size
    if end < 0:
        return None
    crc, mark = _END.unpack_from(pages, crc_begin)
    if mark != _MARK or zlib.crc32(pages[:crc_begin]) != crc:
        return None
    (length,) = _LENGTH.unpack_from(pages, end)
    index: dict[str, Any] = json.loads(bytes(pages[end - length : end]))
    return index
