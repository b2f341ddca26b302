"""The files of one attempt: every instance's output as it was written.

Bytes are written through at once: the files are complete even if the launcher is killed later.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class OutputFiles:
    """Files ``instance-INDEX.stdout`` and ``.stderr`` in one folder; without a folder, nothing."""

    def __init__(self, folder: str | None, num_instances: int) -> None:
        self.trouble = ""
        self._folder = Path(folder) if folder is not None else None
        self._width = len(str(num_instances - 1))
        self._files: dict[tuple[int, str], BinaryIO] = {}

    def open(self, instance: int) -> None:
        """Make the files of an instance, also of one that will never write."""
        self.write(instance, "stdout", b"")
        self.write(instance, "stderr", b"")

    def write(self, instance: int, stream: str, data: bytes) -> None:
        """Add what an instance wrote to its file; after ``trouble`` nothing is written."""
        if self._folder is None or self.trouble:
            return
        try:
            file = self._files.get((instance, stream))
            if file is None:
                path = self._folder / f"instance-{instance:0{self._width}}.{stream}"
                file = self._files[instance, stream] = _open_private(path)
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0 :]
        except OSError as error:
            # A full disk must not end a job that runs well.
            self._note(error)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:  # a full network file system may report it only now
                self._note(error)
        self._files.clear()

    def _note(self, error: OSError) -> None:
        self.trouble = f"{self._folder} is incomplete: {error.strerror}"


def _open_private(path: Path) -> BinaryIO:
    """Open a file, which only its owner can read, to write at its end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return open(os.open(path, flags, 0o600), "wb", buffering=0)  # noqa: PTH123 (of a descriptor)
