"""Where a job's output is shown: on our own descriptors, or where Python's ``print`` goes.

In a notebook, and where tests capture, ``sys.stdout`` is another place than descriptor 1.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from pathlib import Path
from typing import IO

_CHUNK = 1 << 16


def has_own_descriptors() -> bool:
    """Whether ``print`` writes to descriptors 1 and 2 of this process."""
    return _descriptor_of(sys.stdout) == 1 and _descriptor_of(sys.stderr) == 2


def _descriptor_of(stream: object) -> int:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return -1


class Echo:
    """Writes what comes through a pipe to ``sys.stdout`` or ``sys.stderr``, as it comes.

    Args:
        pipe: of the launcher's process.
        name: ``stdout`` or ``stderr``, looked up anew for every piece.
        kept: the file that gets the same; None for none.
    """

    def __init__(self, pipe: IO[bytes], name: str, kept: Path | None) -> None:
        self._pipe = pipe
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = None if kept is None else kept.open("ab", buffering=0)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is more."""
        return self._pipe.fileno()

    def pass_on(self) -> bool:
        """Write a piece of what is there; returns whether there was any."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if self._kept is not None:
            with contextlib.suppress(OSError):  # a full disk ends no job
                self._kept.write(data)
        if text := self._decoder.decode(data, final=not data):
            # Somebody's own stream may be closed, or raise anything: the job goes on unseen.
            with contextlib.suppress(Exception):
                stream = getattr(sys, self._name)
                stream.write(text)
                stream.flush()
        return bool(data)

    def drain(self) -> None:
        """Write all that is there, without waiting for more."""
        while self.pass_on():
            pass

    def close(self) -> None:
        """Close the pipe and the file."""
        self._pipe.close()
        if self._kept is not None:
            self._kept.close()
