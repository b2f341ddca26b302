"""The interface of metrics sinks, and the files to which two of the sinks append."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from popdist_py.errors import are, counted

# The name of the column with the steps. A metric must not have the name of this column.
STEP_COLUMN: Final = "step"


class MetricsSink(Protocol):
    """The interface of a sink for ``Metrics.log``.

    Any object with the methods of this class is a sink.

    All instances of a job make a sink object, but only the first instance calls ``write``.
    Therefore a sink must not open files or connections before the first ``write``. The first error
    of each sink is logged as a warning.
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
        size: The size of the file's valid content in bytes. Bytes after the valid content are
            overwritten.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._start_of_last = size

    def append(self, piece: bytes, *, instead_of_last: bool = False) -> None:
        """Append ``piece`` to the file, or with ``instead_of_last`` replace the last piece.

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


def read_earlier_lines(path: Path) -> bytes:
    """Return the complete lines of an existing file, or make the folder of a new file.

    A killed writer may leave an incomplete last line, which is left out.

    Raises:
        OSError: The file cannot be read, or its folder cannot be made.
        ValueError: The path is not a regular file, or the file does not contain metrics.
    """
    if path.exists() and not path.is_file():
        # Reading a file such as /dev/stdout would never end.
        raise ValueError(f"{path} is not a regular file: give another path")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return b""
    lines = data[: data.rfind(b"\n") + 1]
    # A sink creates the file with its first line atomically. A file that contains only an
    # incomplete line is therefore from another program.
    if data and not lines:
        raise not_metrics(path)
    return lines


def not_metrics(path: Path) -> ValueError:
    """Return the error for a file that another program has written."""
    return ValueError(f"the file {path} was not written by a metrics sink: give another path")


def warn_of_replaced(path: Path, count: int, noun: str, step: int) -> None:
    """Warn that ``count`` rows or lines of an earlier run, from ``step`` on, are replaced."""
    if count:
        logging.getLogger("popdist").warning(
            "%s: %s of an earlier run %s replaced, from step %d on",
            path, counted(count, noun), are(count), step,
        )  # fmt: skip
