"""The file ``instance-N.values.jsonl`` with a line of JSON for each logged step.

Numbers that are not finite are written as NaN, Infinity and -Infinity, which Python's json module
can read.
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

NAME: Final = "values.jsonl"
_has_failed = False


def log_values(step: int, values: Mapping[str, float]) -> None:
    """Append the values of a step to the file of logged values, if this process writes that file.

    The first error is logged as a warning. After this error, no more values are written.
    """
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
            "logged values are no longer written to %s (%s); training continues",
            path,
            error.strerror,
        )


def append_line(path: Path, line: str, most_bytes: int) -> None:
    """Add a line to a file in a single write, so that no part of a line remains after an error.

    If the file is new, only its owner can read it.

    Raises:
        OSError: The file cannot be written, or the line would make it larger than ``most_bytes``.
    """
    data = f"{line}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size + len(data) > most_bytes:
            raise OSError(None, f"the file has reached its limit of {most_bytes >> 20} MiB")
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(None, "the disk is full")
    finally:
        os.close(descriptor)
