"""Limits of a process's control groups, and how often or how long the kernel enforced the limits.

This module reads control groups of version 1 and of version 2.
"""

import os

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterator

# Maps each version of control groups to a pair: the file that counts events, and the file with the
# limit.
_MEMORY = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}
_PROCESSES = {1: ("pids.events", "pids.max"), 2: ("pids.events", "pids.max")}
# Control groups of version 1 without a limit show a number near 2 ** 63 as the limit, so greater
# numbers than this one mean that there is no limit.
_NO_LIMIT = 1 << 60


def memory_state(root: str = "/", pid: int | str = "self") -> dict[str, int]:
    """Return a process's memory limit, and how many processes the kernel killed at that limit.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
        pid: The id of the process.

    Returns:
        A dictionary with ``oom_kills`` and ``limit_bytes``, if they are known.
    """
    return _state(root, pid, "memory", _MEMORY, ("oom_kill", "oom_kills"), "limit_bytes")


def process_state(root: str = "/") -> dict[str, int]:
    """Return the process limit of this control group, and how often the kernel refused a process.

    Returns:
        A dictionary with ``refused`` and ``limit``, if they are known.
    """
    return _state(root, "self", "pids", _PROCESSES, ("max", "refused"), "limit")


def throttled_seconds(root: str = "/") -> float:
    """Return how many seconds this process could not run because its CPU quota was used up."""
    seconds = 0.0
    for folder, _ in _folders(root, "self", "cpu"):
        words = _read(os.path.join(folder, "cpu.stat")).split()
        # In the file cpu.stat, each name is followed by its number.
        values = dict(zip(words[::2], words[1::2], strict=False))
        if "throttled_usec" in values:  # control groups of version 2 count microseconds
            seconds = max(seconds, int(values["throttled_usec"]) / 1e6)
        elif "throttled_time" in values:  # control groups of version 1 count nanoseconds
            seconds = max(seconds, int(values["throttled_time"]) / 1e9)
    return seconds


def _state(
    root: str,
    pid: int | str,
    controller: str,
    files: "dict[int, tuple[str, str]]",
    event: "tuple[str, str]",
    limit: str,
) -> dict[str, int]:
    """Return how often an event has occurred, and the lowest limit that applies to a process.

    ``event`` is a pair: the event's name in the kernel's file, and the key for the number of events
    in the result. ``limit`` is the key of the limit in the result.
    """
    word, name = event
    state: dict[str, int] = {}
    for folder, version in _folders(root, pid, controller):
        events_file, limit_file = (os.path.join(folder, file) for file in files[version])
        words = _read(events_file).split()
        if word in words and name not in state:
            state[name] = int(words[words.index(word) + 1])
        text = _read(limit_file).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            state[limit] = min(int(text), state.get(limit, int(text)))
    return state


def _folders(root: str, pid: int | str, controller: str) -> "Iterator[tuple[str, int]]":
    """Yield each folder of a process's control group and its parent groups, with its version."""
    lines = _read(os.path.join(root, f"proc/{pid}/cgroup")).splitlines()
    entries = [line.split(":", 2) for line in lines if line.count(":") > 1]
    # A controller, such as "memory", exists only in one of the two versions of control groups.
    named = [each for each in entries if controller in each[1].split(",")]
    for _, controllers, path in named or [each for each in entries if not each[1]]:
        version = 1 if controllers else 2
        base = os.path.join(root, "sys/fs/cgroup", controller if version == 1 else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield os.path.join(base, *parts[:depth]), version


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
