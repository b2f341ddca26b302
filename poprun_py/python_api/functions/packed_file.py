"""A file with one pickled value: a pickle, its buffers, and at the end an index of both.

    pickle | buffers, each at a multiple of 64 bytes | index (JSON) | its length | CRC-32 | mark

Arrays are written from where they lie, and read by mapping the file: they are in memory once on
either side. The CRC-32 is of everything before it, what arrays hold too: a file of which a part is
missing or changed is refused. Every file is 0600; one that somebody else may have written is
refused too.
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

from popdist_py.own_files.owner import NotOwnFileError, check_own

# What NumPy and torch align their own memory to.
_ALIGNMENT = 64
# Smaller files are read: so many bytes may be in memory twice.
_LEAST_MAPPED = 1 << 20
_MARK = b"\x93poprun2"
# The length of the index; then the CRC-32 of all that is before it, and the mark.
_LENGTH = struct.Struct(">Q")
_END = struct.Struct(f">I{len(_MARK)}s")


class IncompleteFileError(Exception):
    """The file is not there, is another user's, only a part of it is there, or it was changed."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file that is mapped: what stands in its index, and the value once it is loaded.

    ``head`` holds what is known without unpickling anything.
    """

    head: dict[str, Any]
    _stream: memoryview
    _buffers: tuple[memoryview, ...]

    def load(self) -> Any:
        """Return the value; its arrays lie in the file's pages, private to this process.

        They can be written to, and stay when the file is removed.

        Raises:
            Exception: whatever unpickling raises.
        """
        return pickle.loads(self._stream, buffers=self._buffers)


def write_packed(path: Path, head: dict[str, Any], value: object) -> None:
    """Write a file that others see whole or not at all.

    Raises:
        OSError: it cannot be written.
        Exception: whatever pickling the value raises.
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


class SummedFile:
    """A file that is written from its beginning to its end, with the CRC-32 of it so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.sum = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write more; returns how many bytes that was."""
        written = self._file.write(data)
        self.sum = zlib.crc32(data, self.sum)
        self.size += written
        return written


@contextmanager
def create(path: Path) -> Iterator[SummedFile]:
    """Open a new file that its owner alone can read, for the block.

    Raises:
        OSError: that is not possible.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        yield SummedFile(file)


def append_buffers(
    file: SummedFile, head: dict[str, Any], buffers: Sequence[pickle.PickleBuffer]
) -> None:
    """Finish a file in which the pickle stands: add the buffers, the index and the mark."""
    size = file.size
    places = []
    for buffer in buffers:
        file.write(bytes(-file.size % _ALIGNMENT))
        with buffer.raw() as raw:
            places.append((file.size, raw.nbytes))
            file.write(raw)
    index = json.dumps({"head": head, "pickle": size, "buffers": places}).encode()
    file.write(index + _LENGTH.pack(len(index)))
    file.write(_END.pack(file.sum, _MARK))


def _pages(file: IO[bytes]) -> mmap.mmap:
    """Return what is in a file: mapped if it is large, since a mapping keeps a descriptor."""
    size = os.fstat(file.fileno()).st_size
    if size < _LEAST_MAPPED:
        pages = mmap.mmap(-1, max(1, size))
        pages.write(file.read())
        return pages
    if sys.version_info >= (3, 13):
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def _index(pages: memoryview) -> dict[str, Any] | None:
    """Return the index of a file; None if the file is not as it was written."""
    sum_begin = len(pages) - _END.size
    end = sum_begin - _LENGTH.size
    if end < 0:
        return None
    total, mark = _END.unpack_from(pages, sum_begin)
    if mark != _MARK or zlib.crc32(pages[:sum_begin]) != total:
        return None
    (length,) = _LENGTH.unpack_from(pages, end)
    index: dict[str, Any] = json.loads(bytes(pages[end - length : end]))
    return index


def open_packed(path: Path) -> PackedFile:
    """Map a file that ``append_buffers`` finished.

    Raises:
        IncompleteFileError: it is not there, not whole, or changed, or others can write to it.
    """
    try:
        with path.open("rb") as file:
            # Its folder, if it is still in one, is the job's: nobody else can enter it.
            check_own(file.fileno(), path)
            pages = memoryview(_pages(file))
    except (OSError, NotOwnFileError) as error:
        raise IncompleteFileError(str(error)) from None
    index = _index(pages)
    if index is None:
        raise IncompleteFileError(f"{path} is not whole, or was changed")
    return PackedFile(
        index["head"],
        pages[: index["pickle"]],
        tuple(pages[begin : begin + size] for begin, size in index["buffers"]),
    )
