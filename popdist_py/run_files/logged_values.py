"""What a program logged at its steps, a line of JSON for each: ``instance-N.values.jsonl``.

Numbers that are not finite are written as Python's json reads them: NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from popdist_py.environment import RUN_FILE_MIB
from popdist_py.run_files.place import run_file

__all__ = ["NAME", "append_line", "log_values"]

NAME: Final = "values.jsonl"
_has_failed = False


def log_values(step: int, values: Mapping[str, float]) -> None:
    """Add a line to this program's file, if it has one; a failure is a warning, once."""
    global _has_failed
    path = None if _has_failed else run_file(NAME)
    if path is None:
        return
    line = json.dumps({"at": round(time.time(), 6), "step": step, "values": dict(values)})
    try:
        append_line(path, line, RUN_FILE_MIB << 20)
    except OSError as error:
        _has_failed = True
        logging.getLogger("popdist").warning(
            "%s gets no more values: %s; training goes on", path, error.strerror
        )


def append_line(path: Path, line: str, most_bytes: int) -> None:
    """Add a line to a file that its owner alone can read, in one write: whole or not at all.

    Raises:
        OSError: it cannot be written, or the file would have more than ``most_bytes``.
    """
    data = f"{line}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size + len(data) > most_bytes:
            raise OSError(None, f"it has {most_bytes >> 20} MiB, the most that is kept")
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(None, "the disk is full")
    finally:
        os.close(descriptor)
