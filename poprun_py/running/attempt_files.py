"""Files of an attempt that grow while the job runs: training steps and views of the job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from popdist_py.atomic_file import open_private
from poprun_py.running.output_files import write_all

# Importing these modules at run time would delay the job, because FileRecorder is created before
# mpirun starts.
if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView
    from poprun_py.running.watch.records import StepRecord

# After each _PART_BYTES of a file of steps or views, the interval between the steps or views to
# write is multiplied by _THINNING.
_PART_BYTES: Final = 64 << 20
_THINNING: Final = 8


class _AppendedFile:
    """A file of an attempt that only the user can read, created by the first ``write``.

    The file is unbuffered, so that it is complete even if the launcher is killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = open_private(self._path, "ab", buffering=0)
            write_all(self._file, data)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class FileRecorder:
    """Appends steps to ``steps.jsonl`` and views to ``looks.jsonl``, which only the user can read.

    When a file has reached 64 MiB, only every 8th step or view is written, after 128 MiB only every
    64th, and so on. A line of such a thinned-out file contains the factor, such as 8, with the
    key ``every``. A step is written if its number is divisible by the factor. The last view of the
    job is always written.
    """

    def __init__(self, folder: Path, part_bytes: int = _PART_BYTES) -> None:
        self._steps = _JsonLines(folder / "steps.jsonl", part_bytes)
        self._views = _JsonLines(folder / "looks.jsonl", part_bytes)
        self._num_views = 0
        self._skipped: tuple[JobView, float] | None = None  # last view, if not written

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Write new training steps of one instance.

        Raises:
            OSError: The file of steps cannot be written.
        """
        every = self._steps.every
        kept: Iterable[StepRecord] = records
        if every > 1:
            kept = (replace(each, every=every) for each in records if each.step % every == 0)
        self._steps.write_lines(json.dumps(each.to_json(), allow_nan=False) for each in kept)

    def view(self, view: JobView, at: float) -> None:
        """Write a view of the job.

        Raises:
            OSError: The file of views cannot be written.
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
        self._views.write_lines([f'{text[:-1]}, "every": {every}}}' if every > 1 else text])

    def close(self) -> None:
        """Write the job's last view if it was left out, and close the files; ignore errors."""
        if self._skipped is not None:
            with contextlib.suppress(OSError):
                self._write_view(*self._skipped)
        for file in (self._steps, self._views):
            # When a file is closed, a network file system may report that lines were not stored.
            with contextlib.suppress(OSError):
                file.close()


class _JsonLines(_AppendedFile):
    """A file with one JSON document per line."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        super().__init__(path)
        self._part_bytes = part_bytes
        self._num_bytes = 0

    @property
    def every(self) -> int:
        """The interval between written steps or views; 8 means that every 8th is written."""
        return int(_THINNING ** (self._num_bytes // self._part_bytes))

    def write_lines(self, documents: Iterable[str]) -> None:
        text = "".join([f"{each}\n" for each in documents]).encode()
        self._num_bytes += len(text)
        if text:
            self.write(text)
