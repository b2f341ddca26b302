"""The largest array size for one-shot reductions, which is measured once per machine.

This module measures the times of a barrier and of a reduction, and stores the size limit.
``HostGroup`` computes the size limit from the measured times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from popdist_py import measured_values

__all__ = ["measure", "recall", "remember"]

# Each measurement is repeated, and the shortest time counts, because other work on the machine can
# only lengthen a measured time.
_ROUNDS, _BARRIERS, _REDUCTIONS, _BYTES = 4, 5, 2, 64 * 1024
_FILE, _VERSION = "crossover", 3


def measure(wait_for_all: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds that one barrier takes, and the seconds to reduce one byte.

    The measurement takes a few milliseconds.

    Args:
        wait_for_all: A function that waits at a barrier for all instances of the host. All of these
            instances must call ``measure``.
    """
    left, right = np.zeros((2, _BYTES // 4), np.float32)
    per_barrier = _shortest(_BARRIERS, wait_for_all)
    per_byte = _shortest(_REDUCTIONS, lambda: np.add(left, right, out=left)) / _BYTES
    return per_barrier, per_byte


def _shortest(calls: int, call: Callable[[], object]) -> float:
    """Measure ``call`` several times, and return the shortest time in seconds per call."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / calls


def recall(instances: int, cores: int) -> int | None:
    """Return the stored size limit for these numbers of instances and cores, or None."""
    limit = measured_values.recall(_FILE, _key(instances, cores))
    return limit if isinstance(limit, int) else None


def remember(instances: int, cores: int, limit: int) -> None:
    """Store the size limit for later jobs; do nothing if the file cannot be written."""
    measured_values.remember(_FILE, _key(instances, cores), limit)


def _key(instances: int, cores: int) -> str:
    return f"{_VERSION}/{instances} instances/{cores} cores"
