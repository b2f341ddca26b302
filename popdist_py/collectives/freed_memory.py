"""glibc malloc settings that keep freed memory for reuse in training, but not in compilation.

By default, glibc returns large blocks of freed memory to the system at once. With this default, a
training step that frees and allocates 100 MB of gradients spends more time on page faults than on
the reduction of the gradients.

This module does not allocate memory and does not communicate.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = [
    "freed_memory_given_back",
    "give_back_freed_memory",
    "give_back_kept_memory",
    "keep_freed_memory",
]

# These parameter numbers of mallopt(3) are fixed by glibc's interface.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MOST_KEPT_BYTES = (1 << 31) - 1  # mallopt accepts a C int.
# glibc starts with these settings. By default, glibc later raises the mmap threshold itself, up to
# 32 MiB.
_USUAL_THRESHOLD, _USUAL_MMAP_MAX = 128 << 10, 65536


def keep_freed_memory() -> bool:
    """Let glibc keep up to 2 GiB of freed memory; return whether glibc accepted the setting.

    The function does nothing with another C library, or if the user has set a ``MALLOC_...``
    variable or malloc options in ``GLIBC_TUNABLES``.
    """
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST_KEPT_BYTES})


def give_back_freed_memory() -> bool:
    """Let glibc free large blocks to the system at once; return whether glibc accepted the setting.

    The compilation of a model frees blocks that training steps cannot reuse, because the sizes
    differ. If glibc kept the blocks that compilation frees, the job would need more memory.
    ``keep_freed_memory()`` undoes the effect of this function.
    """
    return _set(
        {
            _MMAP_MAX: _USUAL_MMAP_MAX,
            _MMAP_THRESHOLD: _USUAL_THRESHOLD,
            _TRIM_THRESHOLD: _USUAL_THRESHOLD,
        }
    )


def give_back_kept_memory() -> None:
    """Make glibc return its freed memory to the system now. The settings do not change."""
    if _mallopt() is not None:
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Let glibc return freed memory to the system in the ``with`` block, and keep it afterwards.

    If the block raises an error, glibc keeps freed memory too, because another model may be
    training.
    """
    give_back_freed_memory()
    try:
        yield
    finally:
        keep_freed_memory()


def _set(parameters: dict[int, int]) -> bool:
    mallopt = _mallopt()
    return mallopt is not None and all(mallopt(*pair) for pair in parameters.items())


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return the C library's mallopt(); None if it is missing or the user set malloc options."""
    own = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in own or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
