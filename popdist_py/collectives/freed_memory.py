"""What becomes of freed memory: given back while compiling, kept for the next step in training.

By default glibc gives large blocks back to the system at once. A step that frees and allocates
100 MB of gradients then spends more time on page faults than on the reduction.

Nothing here allocates or communicates.
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

# mallopt(3): the numbers of the parameters are part of glibc's interface.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MOST_KEPT_BYTES = (1 << 31) - 1  # mallopt takes a C int
# What glibc has at its start; it raises the threshold to 32 MiB by itself.
_USUAL_THRESHOLD, _USUAL_MMAP_MAX = 128 << 10, 65536


def keep_freed_memory() -> bool:
    """Have glibc keep up to 2 GiB of freed memory; return whether it does.

    A user's own settings (``MALLOC_...`` variables, ``GLIBC_TUNABLES``) stay as they are, and with
    another C library nothing happens.
    """
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST_KEPT_BYTES})


def give_back_freed_memory() -> bool:
    """Have glibc give large blocks back at once, until it keeps them; return whether it does.

    What is freed while a model is compiled has other sizes than what its steps need: kept, it would
    lie beside that.
    """
    return _set(
        {
            _MMAP_MAX: _USUAL_MMAP_MAX,
            _MMAP_THRESHOLD: _USUAL_THRESHOLD,
            _TRIM_THRESHOLD: _USUAL_THRESHOLD,
        }
    )


def give_back_kept_memory() -> None:
    """Give back what was freed and kept so far; what is freed later is kept again."""
    if _mallopt() is not None:
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Give freed memory back in this block, and keep it from then on, however the block ends.

    After an error too: another model may train already.
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
    """Return the C library's function; None where it lacks it or the user decides."""
    own = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in own or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
