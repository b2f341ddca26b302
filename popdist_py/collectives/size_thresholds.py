"""Where one way of reducing becomes faster than another: measured once, remembered per machine.

The file is a hint: a missing, unreadable or foreign one means measuring again.
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

_MEETINGS, _REDUCTIONS, _BYTES = 16, 8, 64 * 1024
_VERSION = 1


def measure(meet: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one meeting and of reducing one byte; takes some milliseconds.

    Args:
        meet: waits for all instances of the host; they all make this call.
    """
    meet()
    start = time.perf_counter()
    for _ in range(_MEETINGS):
        meet()
    meeting = (time.perf_counter() - start) / _MEETINGS
    left, right = np.zeros((2, _BYTES // 4), np.float32)
    np.add(left, right, out=left)
    start = time.perf_counter()
    for _ in range(_REDUCTIONS):
        np.add(left, right, out=left)
    return meeting, (time.perf_counter() - start) / _REDUCTIONS / _BYTES


def recall(instances: int, cores: int) -> int | None:
    """Return the limit that was measured on this machine for a job like this, if any."""
    with suppress(OSError, ValueError, AttributeError):
        limit = json.loads(_file().read_text()).get(_key(instances, cores))
        return limit if isinstance(limit, int) else None
    return None


def remember(instances: int, cores: int, limit: int) -> None:
    """Keep a limit for later jobs; where no file can be written, do nothing."""
    path = _file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        limits: dict[str, int] = {}
        with suppress(OSError, ValueError):
            limits = dict(json.loads(path.read_text()))
        limits[_key(instances, cores)] = limit
        # Another job may read the file at any time.
        with replaced_at_end(path) as partial:
            partial.write_text(json.dumps(limits))


def _file() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "popdist"
        / ("crossover.json")
    )


def _key(instances: int, cores: int) -> str:
    return f"{_VERSION}/{platform.node()}/{instances} instances/{cores} cores"
