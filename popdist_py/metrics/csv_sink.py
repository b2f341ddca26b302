"""The sink that writes metrics to a CSV file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from popdist_py.atomic_file import replaced_at_end
from popdist_py.metrics.sink import (
    STEP_COLUMN,
    AppendedFile,
    not_metrics,
    read_earlier_lines,
    warn_of_replaced,
)


class CsvSink:
    """Writes metrics to a CSV file, with a row for each step and a column for each name.

    The first column is ``step``. When ``write`` returns, the row is in the file but may not be on
    the disk yet. If a later step has a metric with a new name, the file is replaced by a file with
    one more column. The new column is empty in the earlier rows.

    If the file exists, the first write removes the rows of its step and of later steps, and appends
    to the remaining rows. So the file contains each step once, even if training continues from a
    checkpoint. Give each run its own file. If a program has several ``Metrics`` objects, pass the
    same sink to all of them.

    Args:
        path: The path of the file. The folder of the file is made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._columns: list[str] = []
        self._last: tuple[int, Mapping[str, float]] | None = None
        self._file: AppendedFile | None = None

    def __repr__(self) -> str:
        return f"CsvSink({str(self.path)!r})"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row. If ``step`` is the last written step, add the values to the last row.

        Raises:
            OSError: The file cannot be written.
            ValueError: The existing file does not contain metrics.
        """
        is_same_step = self._last is not None and self._last[0] == step
        if is_same_step and self._last is not None:
            values = {**self._last[1], **values}
        if self._file is None:
            self._columns, rows = self._rows_before(step)
            self._replace([*self._columns, *_new(values, self._columns)], rows)
        elif new := _new(values, self._columns):
            rows = _parsed(read_earlier_lines(self.path))[1:]
            self._replace([*self._columns, *new], rows[:-1] if is_same_step else rows)
            is_same_step = False
        row = [str(step), *(repr(values[n]) if n in values else "" for n in self._columns[1:])]
        assert self._file is not None
        self._file.append(_text([row]), instead_of_last=is_same_step)
        self._last = step, values

    def close(self) -> None:
        """Do nothing, because ``write`` writes each row immediately."""

    def _rows_before(self, step: int) -> tuple[list[str], list[list[str]]]:
        """Return the columns of the file, and the rows for steps before ``step``."""
        rows = _parsed(read_earlier_lines(self.path))
        if not rows:
            return [STEP_COLUMN], []
        columns = rows[0]
        try:
            steps = [int(row[0]) for row in rows[1:]]
        except (ValueError, IndexError):
            steps = None
        if columns[:1] != [STEP_COLUMN] or steps is None:
            raise not_metrics(self.path)
        kept = [row for row, its_step in zip(rows[1:], steps, strict=True) if its_step < step]
        warn_of_replaced(self.path, len(steps) - len(kept), "row", step)
        return columns, kept

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        """Replace the file atomically by a file with the given columns and rows."""
        padded = ([*row, *[""] * (len(columns) - len(row))] for row in rows)
        data = _text([columns, *padded])
        with replaced_at_end(self.path) as partial:
            partial.write_bytes(data)
        self._columns = columns
        self._file = AppendedFile(self.path, len(data))


def _new(values: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    return [name for name in values if name not in columns]


def _parsed(lines: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(lines.decode(errors="replace"), newline="")))


def _text(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
