"""The largest array size for one-shot reductions, which is measured once per machine.

This module measures times and stores the size. ``HostGroup`` computes the size from the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from popdist_py import measured_values

__all__ = ["measure", "recall", "remember"]

# A measurement is repeated several times, and the shortest time is used, because other work on the
# machine only lengthens the times.
_ROUNDS, _BARRIERS, _REDUCTIONS, _BYTES = 4, 5, 2, 64 * 1024
_FILE, _VERSION = "crossover", 3


def measure(wait_for_all: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of one barrier and of reducing one byte.

    The measurement takes some milliseconds.

    Args:
        wait_for_all: The barrier of all instances of the host, which must all call ``measure``.
    """
    left, right = np.zeros((2, _BYTES // 4), np.float32)
    per_barrier = _shortest(_BARRIERS, wait_for_all)
    per_byte = _shortest(_REDUCTIONS, lambda: np.add(left, right, out=left)) / _BYTES
    return per_barrier, per_byte


def _shortest(calls: int, call: Callable[[], object]) -> float:
    """Return the seconds that one call takes, as the shortest of several measurements."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / calls


def recall(instances: int, cores: int) -> int | None:
    """Return the limit measured for these numbers of instances and cores; None if not stored."""
    limit = measured_values.recall(_FILE, _key(instances, cores))
    return limit if isinstance(limit, int) else None


def remember(instances: int, cores: int, limit: int) -> None:
    """Store a limit for later jobs; do nothing if the file cannot be written."""
    measured_values.remember(_FILE, _key(instances, cores), limit)


def _key(instances: int, cores: int) -> str:
    return f"{_VERSION}/{instances} instances/{cores} cores"
