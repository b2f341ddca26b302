"""The files with the output of each instance, which are limited in size.

The file ``instance-0.stdout`` always has the newest output. When it has reached an eighth of the
limit, it is renamed to ``instance-0.stdout.1``, later files to ``instance-0.stdout.2`` and so on.
The first part explains how a program began, and the newest parts explain how it ended. If the parts
of an instance exceed the limit, the oldest parts after the first one are therefore removed. A gap
in the numbers shows that parts were removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from popdist_py.atomic_file import open_private

# The number of parts in the limit. A part ends with a line if a line ends in its last eighth.
_PARTS: Final = 8


def output_path(folder: str, instance: int, stream: str, num_instances: int) -> Path:
    """Return the path of the file with the newest output of an instance's stdout or stderr."""
    # The instance's index is padded with zeros to the width of the greatest index.
    width = len(str(num_instances - 1))
    return Path(folder) / f"instance-{instance:0{width}}.{stream}"


def part_number(path: Path) -> int:
    """Return the number of a file with an earlier part of the output; 0 for other files."""
    number = path.suffix.removeprefix(".")
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else 0


def output_parts(path: Path) -> list[Path]:
    """Return the files of one stream in the order of the output; ``path`` has the newest output."""
    found = [each for each in path.parent.glob(f"{path.name}.*") if part_number(each)]
    return [*sorted(found, key=part_number), path]


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write ``data`` to an unbuffered file, which may accept only a part of it at once.

    Raises:
        OSError: The file cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


class Part(NamedTuple):
    """A part of an instance's output that is complete, with its number and its size in bytes."""

    number: int
    size: int


def _line_end_bytes(part_bytes: int) -> int:
    """Return the size in bytes above which a part ends at the next end of a line."""
    return part_bytes - part_bytes // _PARTS


def bytes_of_part(size: int, data: bytes, part_bytes: int) -> int:
    """Return how many bytes of ``data`` belong to the current part, which has ``size`` bytes.

    A part ends after a line, if a line ends in the last eighth of the part.
    """
    least = _line_end_bytes(part_bytes)
    if size + len(data) < least:
        return len(data)
    line_end = data.find(b"\n", max(0, least - size - 1), max(0, part_bytes - size)) + 1
    return line_end or min(len(data), part_bytes - size)


def is_full(size: int, last: bytes, part_bytes: int) -> bool:
    """Return whether a part of ``size`` bytes, which end with ``last``, is complete."""
    is_line = size >= _line_end_bytes(part_bytes) and last.endswith(b"\n")
    return is_line or size >= part_bytes


def part_to_remove(parts: Mapping[str, Sequence[Part]], limit: int) -> tuple[str, Part] | None:
    """Return the stream and the part to remove next; None if the parts fit the limit.

    The stream with more output loses its oldest part after its first one. Space for the current
    part of each stream is left.
    """
    sizes = {stream: sum(part.size for part in each) for stream, each in parts.items()}
    if sum(sizes.values()) <= limit - len(parts) * (limit // _PARTS):
        return None
    removable = [stream for stream, each in parts.items() if len(each) > 1]
    if not removable:
        return None
    stream = max(removable, key=lambda each: sizes[each])
    return stream, parts[stream][1]


class OutputFile:
    """A file with the newest output of one stream, which only the user can read.

    The file is unbuffered, so that it is complete even if the launcher is killed.

    Args:
        path: The path of the file, which may exist.
        part_bytes: The size at which the file is renamed; None for no limit.

    Attributes:
        parts: The complete parts of the stream.
    """

    def __init__(self, path: Path, part_bytes: int | None) -> None:
        self.path = path
        self.parts: list[Part] = []
        self._part_bytes = part_bytes
        self._line_end_bytes = _line_end_bytes(part_bytes or 0)
        self._size = 0
        self._is_full = False
        self._file = self._open()
        if self._size and part_bytes is not None:
            # An earlier attempt of the job has written to the same folder.
            *earlier, _ = output_parts(path)
            self.parts = [Part(part_number(each), each.stat().st_size) for each in earlier]

    def _open(self) -> BinaryIO:
        file = open_private(self.path, "ab", buffering=0)
        self._size = os.fstat(file.fileno()).st_size
        return file

    def write(self, data: bytes) -> bool:
        """Append output; return whether a part was completed.

        Raises:
            OSError: The file cannot be written or renamed.
        """
        if self._part_bytes is None or self._size + len(data) < self._line_end_bytes:
            write_all(self._file, data)
            self._size += len(data)
            return False
        has_new_part = False
        while data:
            if self._is_full:
                self._begin_part()
                has_new_part = True
            count = bytes_of_part(self._size, data, self._part_bytes)
            now, data = data[:count], data[count:]
            write_all(self._file, now)
            self._size += count
            self._is_full = is_full(self._size, now, self._part_bytes)
        return has_new_part

    def _begin_part(self) -> None:
        """Give the file the name of a complete part, and begin a new file."""
        number = self.parts[-1].number + 1 if self.parts else 1
        self._file.close()
        # The user may have moved the file away.
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self.part_path(number))
            self.parts.append(Part(number, self._size))
        self._is_full = False
        self._file = self._open()

    def part_path(self, number: int) -> Path:
        """Return the path of a complete part."""
        return self.path.with_name(f"{self.path.name}.{number}")

    def remove(self, part: Part) -> None:
        """Remove a complete part.

        Raises:
            OSError: The part cannot be removed.
        """
        self.parts.remove(part)
        self.part_path(part.number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(slots=True)
class OutputFiles:
    """Writes the output of instances to files, if a folder is given.

    Attributes:
        folder: The folder of the files; None to write no files.
        limit: The maximum size of the files of each instance, in bytes; None for no limit.
        trouble: A sentence about the first write error; empty if no error has occurred.
        notice: A sentence about the first part that was removed; empty before.
    """

    folder: str | None
    num_instances: int
    limit: int | None = None
    trouble: str = field(default="", init=False)
    notice: str = field(default="", init=False)
    _files: dict[int, dict[str, OutputFile]] = field(default_factory=dict, init=False)

    def open(self, instance: int) -> None:
        """Create the output files of an instance."""
        self.write(instance, "stdout", b"")
        self.write(instance, "stderr", b"")

    def write(self, instance: int, stream: str, data: bytes) -> None:
        """Append output of an instance to a file; after the first write error, drop the output."""
        if self.folder is None or self.trouble:
            return
        try:
            files = self._files.setdefault(instance, {})
            if stream not in files:
                files[stream] = self._new_file(self.folder, instance, stream)
            if files[stream].write(data) and self.limit is not None:
                self._remove_parts(instance, self.limit)
        except OSError as error:  # a write error, such as a full disk, must not end the job
            self._note(error)

    def _new_file(self, folder: str, instance: int, stream: str) -> OutputFile:
        path = output_path(folder, instance, stream, self.num_instances)
        return OutputFile(path, None if self.limit is None else self.limit // _PARTS)

    def _remove_parts(self, instance: int, limit: int) -> None:
        files = self._files[instance]
        while found := part_to_remove({name: file.parts for name, file in files.items()}, limit):
            stream, part = found
            files[stream].remove(part)
            self.notice = self.notice or (
                f"instance {instance} has written more output than --log-limit allows: "
                f"{self.folder} keeps the beginning and the newest part of this output"
            )

    def close(self) -> None:
        """Close all files."""
        for file in (each for files in self._files.values() for each in files.values()):
            try:
                file.close()
            except OSError as error:  # a network file system may report errors late
                self._note(error)
        self._files.clear()

    def _note(self, error: OSError) -> None:
        self.trouble = f"the output in {self.folder} is incomplete: {error.strerror}"
