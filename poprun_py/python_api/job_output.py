"""What the instances of a job wrote, read from the files in which it is kept. Nothing writes here.

At most the last 8 MiB of a file are read: a program that looks at its jobs must not grow with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

StreamName = Literal["stdout", "stderr"]
STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")
# The file of a job's folder that has everything, as the command shows it.
SHOWN = "shown"
_MOST_BYTES = 8 << 20


def read_shown(folder: Path) -> str:
    """Return what a job has shown."""
    return _end_of(folder / SHOWN)


def read_instance(folders: Sequence[str], instance: int, stream: StreamName | None) -> str:
    """Return what an instance wrote, one attempt after another.

    Args:
        folders: of the attempts.
        instance: its index.
        stream: one of its two, or None for both, first its stdout.
    """
    names = STREAMS if stream is None else (stream,)
    return "".join(_end_of(path) for name in names for path in _files(folders, instance, name))


def _files(folders: Sequence[str], instance: int, stream: StreamName) -> Iterator[Path]:
    for folder in folders:
        for path in Path(folder).glob(f"instance-*.{stream}"):
            # Padded with zeros, as many as the job needs.
            if int(path.stem.removeprefix("instance-")) == instance:
                yield path


def _end_of(path: Path) -> str:
    """Return the end of a file, from the beginning of a line; nothing if it is not there yet."""
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
