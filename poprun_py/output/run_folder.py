"""The folder of --output-dir: every instance's output as it was written, and the report.

Bytes are written through at once: the files are complete even if the launcher is killed later.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from poprun_py.atomic_file import write_whole
from poprun_py.errors import UsageError

__all__ = ["RunFolder"]


class RunFolder:
    """Files ``instance-INDEX.stdout`` and ``.stderr`` in one folder; without a folder, nothing.

    A job that is started again goes on at the end of the same files.

    Raises:
        UsageError: the folder cannot be made or written to.
    """

    def __init__(self, path: str | None, num_instances: int) -> None:
        self.path = Path(path) if path is not None else None
        self._width = len(str(num_instances - 1))
        self.trouble = ""
        self._files: dict[tuple[int, str], BinaryIO] = {}
        if self.path is not None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--output-dir {path}: {error.strerror}") from None
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise UsageError(f"--output-dir {path}: files cannot be made in it")

    def clear(self) -> None:
        """Remove the files of an earlier job.

        Raises:
            UsageError: one cannot be removed.
        """
        if self.path is not None:
            try:
                for old in self.path.glob("instance-*.std*"):
                    old.unlink()
                (self.path / "report.json").unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(f"--output-dir: {error.filename}: {error.strerror}") from None

    def open(self, instance: int) -> None:
        """Make the files of an instance, also of one that will never write."""
        self.write(instance, "stdout", b"")
        self.write(instance, "stderr", b"")

    def write(self, instance: int, stream: str, data: bytes) -> None:
        """Add what an instance wrote to its file; after ``trouble`` nothing is written."""
        if self.path is None or self.trouble:
            return
        try:
            file = self._files.get((instance, stream))
            if file is None:
                name = f"instance-{instance:0{self._width}}.{stream}"
                file = self._files[instance, stream] = (self.path / name).open("ab", buffering=0)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
        except OSError as error:
            # A full disk must not end a job that runs well.
            self.trouble = f"--output-dir {self.path} is incomplete: {error.strerror}"

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def save_report(self, text: str) -> None:
        """Write ``report.json`` in one step, also if somebody removed the folder."""
        if self.path is not None:
            try:
                write_whole(self.path / "report.json", text)
            except OSError as error:
                self.trouble = f"--output-dir {self.path} has no report: {error.strerror}"
