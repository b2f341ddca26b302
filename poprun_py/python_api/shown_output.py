"""The file with the shown output of a job in the background, whose old part is freed.

The launcher process appends to the file by descriptors that it keeps, so this process can neither
rename nor shorten the file. Instead, it frees the disk space of the old part by a hole. The size of
the file stays the same, and readers of its end notice nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

# ``JobHandle.output`` returns at most this number of bytes of a file.
MOST_READ_BYTES: Final = 8 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>.
_PUNCH_HOLE: Final = 0x01 | 0x02


class ShownOutput:
    """The file with the output of all instances, as ``poprun-py`` shows it.

    Args:
        path: The path of the file, which need not exist yet.
        kept_bytes: The number of bytes at the end of the file that are kept in any case. Up to
            twice as many take disk space between two calls of ``free_old_part``.
    """

    def __init__(self, path: Path, kept_bytes: int = MOST_READ_BYTES) -> None:
        self._path = path
        self._kept_bytes = kept_bytes
        self._freed_bytes = 0

    def free_old_part(self) -> None:
        """Free the disk space of all but the end of the file, if the file has grown enough.

        A file system without holes, such as NFS before version 4.2, keeps the whole file.
        """
        with contextlib.suppress(OSError):  # the job's files may have been removed
            end = self._path.stat().st_size - self._kept_bytes
            if end - self._freed_bytes >= self._kept_bytes:
                self._freed_bytes = end
                _punch_hole(self._path, end)


def _punch_hole(path: Path, end: int) -> None:
    """Replace the bytes of a file before ``end`` by a hole, which reads as NUL characters."""
    import ctypes  # Few jobs write so much that they need this module.

    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fallocate = ctypes.CDLL(None).fallocate64
        fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(end))
    except AttributeError:
        pass  # this C library has no such function
    finally:
        os.close(descriptor)
