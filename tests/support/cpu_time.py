"""Limits of CPU time that also hold on a slow machine.

A limit is given in seconds of the machine where it was measured. On a slower machine, or if other
programs use the same cores, the limit is longer by the slowness of the machine.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

__all__ = ["limited_cpu_time", "slowness"]

# The CPU time of `_make_objects` on the machine where the limits were measured. It is derived: a
# search that took 3 s there takes 150 times as long as `_make_objects` on another machine.
_SECONDS = 0.02


@contextlib.contextmanager
def limited_cpu_time(seconds: float) -> Iterator[None]:
    """Fail if the block needs more CPU time than ``seconds`` times the slowness of the machine."""
    before = slowness()
    began = time.process_time()
    yield
    used = time.process_time() - began
    times = max(before, slowness())
    limit = f"{seconds:g} s times the slowness {times:.1f} of this machine"
    assert used < seconds * times, f"{used:.2f} s of CPU time; the limit is {limit}"


def slowness() -> float:
    """Return how many times as long this machine needs for Python code now; at least 1."""
    return max(1.0, statistics.median(_make_objects() for _ in range(5)) / _SECONDS)


def _make_objects() -> float:
    """Return the CPU time for making and sorting objects.

    Like the time of most programs, it depends on the caches of the CPU.
    """
    began = time.process_time()
    made = {(number, str(number)): [number] for number in range(40_000)}
    sorted(made, key=lambda key: -key[0])
    return time.process_time() - began
