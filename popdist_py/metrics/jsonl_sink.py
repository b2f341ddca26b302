"""The sink that writes metrics to a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from popdist_py.atomic_file import replaced_at_end
from popdist_py.metrics.sink import (
    STEP_COLUMN,
    AppendedFile,
    not_metrics,
    read_earlier_lines,
    warn_of_replaced,
)


class JsonlSink:
    """Writes metrics to a file with a JSON object for each step, in a line of its own.

    The first key is ``step``, and the other keys are the names of the metrics. Numbers that are not
    finite are written as NaN, Infinity and -Infinity, which Python's json module can read.

    If the file exists, the first write removes the lines of its step and of later steps, and
    appends to the remaining lines. So the file contains each step once, even if training continues
    from a checkpoint. If a program has several ``Metrics`` objects, pass the same sink to all of
    them.

    Args:
        path: The path of the file. The folder of the file is made if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._last: tuple[int, Mapping[str, float]] | None = None
        self._file: AppendedFile | None = None

    def __repr__(self) -> str:
        return f"JsonlSink({str(self.path)!r})"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line. If ``step`` is the last written step, add the values to the last line.

        Raises:
            OSError: The file cannot be written.
            ValueError: The existing file does not contain metrics.
        """
        is_same_step = self._last is not None and self._last[0] == step
        if is_same_step and self._last is not None:
            values = {**self._last[1], **values}
        if self._file is None:
            kept = self._lines_before(step)
            with replaced_at_end(self.path) as partial:
                partial.write_bytes(kept)
            self._file = AppendedFile(self.path, len(kept))
        line = json.dumps({STEP_COLUMN: step, **values})
        self._file.append(f"{line}\n".encode(), instead_of_last=is_same_step)
        self._last = step, values

    def close(self) -> None:
        """Do nothing, because ``write`` writes each line immediately."""

    def _lines_before(self, step: int) -> bytes:
        """Return the lines of the file for steps before ``step``."""
        lines = read_earlier_lines(self.path).splitlines(keepends=True)
        try:
            kept = [line for line in lines if json.loads(line)[STEP_COLUMN] < step]
        except (ValueError, TypeError, KeyError):
            raise not_metrics(self.path) from None
        warn_of_replaced(self.path, len(lines) - len(kept), "line", step)
        return b"".join(kept)
