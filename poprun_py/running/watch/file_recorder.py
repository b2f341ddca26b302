"""The recorder that writes a job's steps and views to files, more rarely as the files grow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from popdist_py.atomic_file import open_private

# These modules are imported only for type checks. FileRecorder is created before mpirun starts, so
# importing them would delay the job.
if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView
    from poprun_py.running.watch.records import StepRecord

# Each time a file has grown by _PART_BYTES, lines are written _THINNING times more rarely.
_PART_BYTES: Final = 64 << 20
_THINNING: Final = 8


class FileRecorder:
    """Appends steps to ``steps.jsonl`` and views to ``looks.jsonl``, which only the user can read.

    When a file has reached 64 MiB, only every 8th line is written from then on, after 128 MiB only
    every 64th line, and so on. These lines contain the factor with the key ``every``. Steps are
    written if their number is divisible by the factor. The last view is always written.
    """

    def __init__(self, folder: Path, part_bytes: int = _PART_BYTES) -> None:
        self._steps = _JsonLines(folder / "steps.jsonl", part_bytes)
        self._views = _JsonLines(folder / "looks.jsonl", part_bytes)
        self._num_views = 0
        self._skipped: tuple[JobView, float] | None = None  # the last view, if not written yet

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Write new steps of one instance.

        Raises:
            OSError: The file cannot be written.
        """
        every = self._steps.every
        kept: Iterable[StepRecord] = records
        if every > 1:
            kept = (replace(each, every=every) for each in records if each.step % every == 0)
        self._steps.write(json.dumps(each.to_json(), allow_nan=False) for each in kept)

    def view(self, view: JobView, at: float) -> None:
        """Write a view of the job.

        Raises:
            OSError: The file cannot be written.
        """
        is_kept = self._num_views % self._views.every == 0
        self._num_views += 1
        self._skipped = None if is_kept else (view, at)
        if is_kept:
            self._write_view(view, at)

    def _write_view(self, view: JobView, at: float) -> None:
        every = self._views.every
        # Adding keys to the view's cached JSON text is quicker than encoding the view again.
        text = f'{{"at": {round(at, 6)!r}, {view.json_text()[1:]}'
        self._views.write([f'{text[:-1]}, "every": {every}}}' if every > 1 else text])

    def close(self) -> None:
        """Write the last view if it was left out, and close the files. Errors are ignored."""
        if self._skipped is not None:
            with contextlib.suppress(OSError):
                self._write_view(*self._skipped)
        self._steps.close()
        self._views.close()


class _JsonLines:
    """A file with one JSON document per line, created by the first ``write``."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._num_bytes = 0
        self._file: BinaryIO | None = None

    @property
    def every(self) -> int:
        """The current factor; 8 means that every 8th line is written."""
        return int(_THINNING ** (self._num_bytes // self._part_bytes))

    def write(self, documents: Iterable[str]) -> None:
        """Append JSON documents to the file, one per line, without buffering."""
        text = "".join([f"{each}\n" for each in documents])
        if not text:
            return
        try:
            if self._file is None:
                self._file = open_private(self._path, "ab", buffering=0)
            rest = memoryview(text.encode())
            self._num_bytes += len(rest)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        if self._file is not None:
            # A network file system may report only when a file is closed that lines were not
            # stored.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
