"""Files with the output of each instance, in the folder of an attempt."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from popdist_py.atomic_file import open_private


def output_path(folder: str, instance: int, stream: str, num_instances: int) -> Path:
    """Return the path of the file with an instance's ``stdout`` or ``stderr``."""
    # The index is padded with zeros to the width of the greatest index.
    width = len(str(num_instances - 1))
    return Path(folder) / f"instance-{instance:0{width}}.{stream}"


class OutputFiles:
    """Writes output to files ``instance-INDEX.stdout`` and ``.stderr``, if a folder is given.

    The files are unbuffered, so they are complete even if the launcher is killed. ``trouble`` is a
    sentence about the first error; empty if no error has occurred.
    """

    def __init__(self, folder: str | None, num_instances: int) -> None:
        self.trouble = ""
        self._folder = folder
        self._num_instances = num_instances
        self._files: dict[tuple[int, str], BinaryIO] = {}

    def open(self, instance: int) -> None:
        """Create the files of an instance."""
        self.write(instance, "stdout", b"")
        self.write(instance, "stderr", b"")

    def write(self, instance: int, stream: str, data: bytes) -> None:
        """Append output of an instance to its file. After the first error, output is dropped."""
        if self._folder is None or self.trouble:
            return
        try:
            file = self._files.get((instance, stream))
            if file is None:
                path = output_path(self._folder, instance, stream, self._num_instances)
                file = self._files[instance, stream] = open_private(path, "ab", buffering=0)
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError as error:
            # An error such as a full disk must not end the job.
            self._note(error)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:  # a network file system may report errors late
                self._note(error)
        self._files.clear()

    def _note(self, error: OSError) -> None:
        self.trouble = f"{self._folder} is incomplete: {error.strerror}"
