"""Limits of a process's control groups, and how often or how long the kernel enforced them.

Reads files of version 1 or 2.
"""

import os

TYPE_CHECKING = False  # not imported from typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator

# For each version, the file that counts events and the file with the limit.
_MEMORY = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}
_PROCESSES = {1: ("pids.events", "pids.max"), 2: ("pids.events", "pids.max")}
# Without a limit, version 1 shows a number near 2 ** 63.
_NO_LIMIT = 1 << 60


def memory_state(root: str = "/", pid: int | str = "self") -> dict[str, int]:
    """Return the memory limit of a process, and how often the kernel killed for lack of memory.

    Args:
        root: The folder that contains ``proc`` and ``sys``.
        pid: The process.

    Returns:
        ``oom_kills`` and ``limit_bytes``; a value that is not known is absent.
    """
    return _state(root, pid, "memory", _MEMORY, ("oom_kill", "oom_kills"), "limit_bytes")


def process_state(root: str = "/") -> dict[str, int]:
    """Return the limit on the number of processes here, and how often the kernel refused one.

    Returns:
        ``refused`` and ``limit``; a value that is not known is absent.
    """
    return _state(root, "self", "pids", _PROCESSES, ("max", "refused"), "limit")


def throttled_seconds(root: str = "/") -> float:
    """Return how long this process could not run because its share of CPU time was used up."""
    seconds = 0.0
    for folder, _ in _folders(root, "self", "cpu"):
        words = _read(os.path.join(folder, "cpu.stat")).split()
        values = dict(zip(words[::2], words[1::2], strict=False))  # names and numbers alternate
        if "throttled_usec" in values:  # version 2
            seconds = max(seconds, int(values["throttled_usec"]) / 1e6)
        elif "throttled_time" in values:  # version 1
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
    """Return the count of an event and the lowest limit that applies to a process.

    ``event`` is the word in the file of events, and the key of its count in the result. ``limit``
    is the key of the limit.
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
    """Yield folder and version of a process's control group and of the groups around it."""
    lines = _read(os.path.join(root, f"proc/{pid}/cgroup")).splitlines()
    entries = [line.split(":", 2) for line in lines if line.count(":") > 1]
    # A controller that is mounted as version 1 does not exist in version 2.
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
