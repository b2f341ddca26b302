"""What the C library does with memory that a training step frees: keep it for the next step.

By default glibc gives large blocks back to the system at once. A step that frees and allocates
100 MB of gradients then spends more time on page faults than on the reduction.
"""

from __future__ import annotations

import ctypes
import functools
import os

__all__ = ["keep_freed_memory"]

# mallopt(3): the numbers of the parameters are part of glibc's interface.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_MOST_KEPT_BYTES = (1 << 31) - 1  # mallopt takes a C int


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc keep up to 2 GiB of freed memory; return whether it does.

    A user's own settings (``MALLOC_...`` variables, ``GLIBC_TUNABLES``) stay as they are, and with
    another C library nothing happens.
    """
    own = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in own or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _MOST_KEPT_BYTES))
