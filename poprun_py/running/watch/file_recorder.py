"""The recorder that keeps a job's steps and looks in the files of an attempt, bounded for days.

Nothing here decides what is recorded, or reads what was: poprun_py/past_runs does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

# It is made before mpirun starts, which would wait for these.
if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView
    from poprun_py.running.watch.records import StepRecord

# Whenever a file has grown by so much, fewer lines are kept from then on: every so many-th.
_PART_BYTES: Final = 64 << 20
_FEWER: Final = 8


class FileRecorder:
    """Appends to ``steps.jsonl`` and ``looks.jsonl`` of a folder, which only the owner can read.

    After every 64 MiB of a file an eighth of its lines is kept, with ``every`` in them: steps by
    their number, looks by their count, and the last look always. Close it at the end.

    Args:
        folder: of the attempt.
        part_bytes: another size in place of 64 MiB.
    """

    def __init__(self, folder: Path, part_bytes: int = _PART_BYTES) -> None:
        self._steps = _Lines(folder / "steps.jsonl", part_bytes)
        self._looks = _Lines(folder / "looks.jsonl", part_bytes)
        self._num_looks = 0
        self._left_out: tuple[JobView, float] | None = None  # the last look, if it was not kept

    def steps(self, records: Sequence[StepRecord]) -> None:
        """Keep steps of one instance.

        Raises:
            OSError: the file cannot be written.
        """
        every = self._steps.every
        kept: Iterable[StepRecord] = records
        if every > 1:
            kept = (replace(each, every=every) for each in records if each.step % every == 0)
        self._steps.write(json.dumps(each.to_json(), allow_nan=False) for each in kept)

    def look(self, view: JobView, at: float) -> None:
        """Keep a look at all instances.

        Raises:
            OSError: the file cannot be written.
        """
        every = self._looks.every
        is_kept = self._num_looks % every == 0
        self._num_looks += 1
        self._left_out = None if is_kept else (view, at)
        if is_kept:
            self._write_look(view, at)

    def _write_look(self, view: JobView, at: float) -> None:
        every = self._looks.every
        text = f'{{"at": {round(at, 6)!r}, {view.json_text()[1:]}'
        self._looks.write([f'{text[:-1]}, "every": {every}}}' if every > 1 else text])

    def close(self) -> None:
        """Close the files; what cannot be written any more is lost."""
        if self._left_out is not None:
            with contextlib.suppress(OSError):
                self._write_look(*self._left_out)
        self._steps.close()
        self._looks.close()


class _Lines:
    """A file of JSON documents, one a line, made with the first of them."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self._num_bytes = 0
        self._file: int | None = None

    @property
    def every(self) -> int:
        """Of so many lines one is to be kept now."""
        return int(_FEWER ** (self._num_bytes // self._part_bytes))

    def write(self, documents: Iterable[str]) -> None:
        """Append a line for each document, all of them at once.

        Raises:
            OSError: they cannot be written.
        """
        text = "".join([f"{each}\n" for each in documents])
        if not text:
            return
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
            view = memoryview(text.encode())
            self._num_bytes += len(view)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file.

        A network file system may fail only now to store earlier lines; these are lost.
        """
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None
