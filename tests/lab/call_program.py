"""Calls a function on every host given; says what came back, and how much memory that took."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np

import poprun_py

MIB = 1 << 20


def most_memory(pid: int | str = "self") -> int:
    """Return the most MiB that a process of this host has used so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def doubled(numbers: np.ndarray) -> tuple:
    """Return what an instance makes of its argument, and where it is."""
    import socket

    import popdist_py

    index = popdist_py.getInstanceIndex()
    assert numbers.flags.writeable
    numbers *= 2
    files = [name for name in os.listdir("/tmp") if name.startswith("poprun-files")]  # noqa: PTH208
    modes = {Path("/tmp", name).stat().st_mode & 0o777 for name in files}
    wrapper = most_memory(os.getppid())
    inherited = [
        link
        for each in os.scandir("/proc/self/fd")
        if "poprun-files" in (link := os.path.realpath(each.path))
        and os.get_inheritable(int(each.name))
    ]
    return index, socket.gethostname(), numbers, modes, wrapper, inherited


def failing() -> None:
    import popdist_py

    if popdist_py.getInstanceIndex() == 1:
        raise LookupError("no such number")
    import time

    time.sleep(60)


def job(function, *args):
    """Return what a function returned on every host, and the peak memory of the launcher."""
    running = poprun_py.start(function, args=args, num_instances=2, hosts=sys.argv[1])
    values, launcher = None, 0
    while values is None:
        with contextlib.suppress(OSError, StopIteration):
            launcher = most_memory(running.status().pid)
        with contextlib.suppress(TimeoutError):
            values = running.result(0.05)
    return values, launcher


numbers = np.random.default_rng(1).integers(0, 1 << 40, 8 * MIB)
before = most_memory()
values, launcher = job(doubled, numbers)
total = sum(int(result.sum()) for _, _, result, *_ in values)  # pages count once they are read
assert total == 4 * int(numbers.sum())
grown = most_memory() - before
for index, host, result, modes, wrapper, inherited in values:
    right = bool((result == 2 * numbers).all())
    print(index, host, right, modes, wrapper < 64, inherited)
# The results of both instances are here by now.
print("memory", 128 <= grown < 1.2 * 128, 0 < launcher < 64, grown, launcher)
try:
    job(failing)
except LookupError as error:
    print(error, error.__notes__, "no such number" in str(error.__cause__))
