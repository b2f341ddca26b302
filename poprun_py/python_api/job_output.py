"""Functions that copy the output of a job to Python's streams and read it from files."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from pathlib import Path
from typing import IO, Literal

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
# The file in a job's folder with the output of all instances, as ``poprun-py`` shows it.
SHOWN = "shown"
# The most bytes that are read from one output file, which bounds the memory of the calling program.
_MOST_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16


def uses_standard_descriptors() -> bool:
    """Return whether ``print`` writes to descriptors 1 and 2 of this process.

    In a notebook, and in tests that capture output, ``sys.stdout`` writes elsewhere.
    """
    return _descriptor_of(sys.stdout) == 1 and _descriptor_of(sys.stderr) == 2


def _descriptor_of(stream: object) -> int:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return -1


class OutputCopier:
    """Copies output from a pipe to ``sys.stdout`` or ``sys.stderr``.

    Args:
        pipe: The pipe from the launcher process.
        name: ``stdout`` or ``stderr``. The stream is looked up in ``sys`` again for every piece of
            output, because the program may replace the stream.
        file: A file to which the same output is appended; None for no file.
    """

    def __init__(self, pipe: IO[bytes], name: str, file: Path | None) -> None:
        self._pipe = pipe
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._file = None if file is None else file.open("ab", buffering=0)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor of the pipe, which is readable when there is output."""
        return self._pipe.fileno()

    def copy(self) -> bool:
        """Copy one piece of output; return False if the pipe is empty or closed."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the job
                self._file.write(data)
        if text := self._decoder.decode(data, final=not data):
            # The program may have replaced the stream by an object that raises any exception.
            with contextlib.suppress(Exception):
                stream = getattr(sys, self._name)
                stream.write(text)
                stream.flush()
        return bool(data)

    def close(self) -> None:
        """Close the pipe and the file."""
        self._pipe.close()
        if self._file is not None:
            self._file.close()


def read_end(path: Path) -> str:
    """Return the last 8 MiB of a file in whole lines; empty if the file does not exist yet."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MOST_BYTES))
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return ""
    if size > _MOST_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")
