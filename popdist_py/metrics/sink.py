"""The interface of sinks, and the append-only file that two of the sinks use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

# The name of the column with the steps. A metric must not have the same name.
STEP_COLUMN: Final = "step"


class MetricsSink(Protocol):
    """The interface of a sink for ``Metrics.log``.

    Any object with the methods of this class is a sink.

    All instances of the job make a sink, but only the first instance writes. A sink must therefore
    not open anything before its first ``write``. The first error of a sink is logged as a warning.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step."""

    def close(self) -> None:
        """Close open files and connections. A second call does nothing."""


class AppendedFile:
    """A file to which data is appended in pieces.

    If a piece was not written completely, the next piece overwrites it.

    Args:
        path: The path of the file, which must exist.
        size: The size of the valid content. The bytes after the valid content are overwritten.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._start_of_last = size

    def append(self, piece: bytes, *, instead_of_last: bool = False) -> None:
        """Write ``piece`` after the last piece, or with ``instead_of_last`` over the last piece.

        Raises:
            OSError: The piece was not written, or not completely.
        """
        if instead_of_last:
            self._size = self._start_of_last
        self._start_of_last = self._size
        with self._path.open("r+b") as file:
            file.seek(self._size)
            file.write(piece)
            file.truncate()
        self._size += len(piece)
