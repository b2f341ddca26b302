"""What a sink is, and the file that two of them append to. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["AppendedFile", "MetricsSink"]


class MetricsSink(Protocol):
    """Where ``Metrics.log`` writes; any object with these two methods will do.

    Every instance of the job makes one, but only the first writes: nothing is opened before the
    first ``write``. What ``write`` raises becomes a warning, once, and training goes on.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step."""

    def close(self) -> None:
        """Release what is open; calling it again does nothing."""


class AppendedFile:
    """A file that grows by whole pieces: the next one overwrites a piece that failed half-way.

    Args:
        path: of the file, which is there.
        size: its bytes up to now; what comes after them is given up.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._start_of_last = size

    def append(self, piece: bytes, *, instead_of_last: bool = False) -> None:
        """Write ``piece``, after the last one or in its place.

        Raises:
            OSError: it cannot be written, or not all of it.
        """
        if instead_of_last:
            self._size = self._start_of_last
        self._start_of_last = self._size
        with self._path.open("r+b") as file:
            file.seek(self._size)
            file.write(piece)
            file.truncate()
        self._size += len(piece)
