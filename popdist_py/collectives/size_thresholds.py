"""The size at which one way of reducing becomes faster than another, measured once per machine.

The file is a cache: if it is missing, unreadable or of another kind, the limit is measured again.
Nothing here decides which way an array takes.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from popdist_py.atomic_file import replaced_at_end

__all__ = ["measure", "recall", "remember"]

_BARRIERS, _REDUCTIONS, _BYTES = 16, 8, 64 * 1024
_VERSION = 1


def measure(wait_for_all: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one barrier and of reducing one byte; takes some milliseconds.

    Args:
        wait_for_all: waits for all instances of the host, which all call ``measure``.
    """
    wait_for_all()
    start = time.perf_counter()
    for _ in range(_BARRIERS):
        wait_for_all()
    per_barrier = (time.perf_counter() - start) / _BARRIERS
    left, right = np.zeros((2, _BYTES // 4), np.float32)
    np.add(left, right, out=left)
    start = time.perf_counter()
    for _ in range(_REDUCTIONS):
        np.add(left, right, out=left)
    return per_barrier, (time.perf_counter() - start) / _REDUCTIONS / _BYTES


def recall(instances: int, cores: int) -> int | None:
    """Return the limit measured on this machine for as many instances and cores, if any."""
    with suppress(OSError, ValueError, AttributeError):
        limit = json.loads(_cache_file().read_text()).get(_key(instances, cores))
        return limit if isinstance(limit, int) else None
    return None


def remember(instances: int, cores: int, limit: int) -> None:
    """Store a limit for later jobs; do nothing where no file can be written."""
    path = _cache_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        limits: dict[str, int] = {}
        with suppress(OSError, ValueError):
            limits = dict(json.loads(path.read_text()))
        limits[_key(instances, cores)] = limit
        # Another job may read the file at any time.
        with replaced_at_end(path) as partial:
            partial.write_text(json.dumps(limits))


def _cache_file() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "popdist"
        / "crossover.json"
    )


def _key(instances: int, cores: int) -> str:
    return f"{_VERSION}/{platform.node()}/{instances} instances/{cores} cores"
