"""The limits of a control group, and how often the kernel has refused something because of them.

Reads files only. Standard library only and cheap to import.
"""

import os

# By version of control groups: the files with the events and with the limit.
_MEMORY = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}
_PROCESSES = {1: ("pids.events", "pids.max"), 2: ("pids.events", "pids.max")}
# What version 1 says where there is no limit is near 2 ** 63.
_NO_LIMIT = 1 << 60


def memory_state(root: str = "/", pid: int | str = "self") -> dict[str, int]:
    """Return how often the kernel killed for want of memory here, and the memory limit in bytes.

    Reads the control group of ``pid``, version 2 or 1, below ``root``; what is not known is absent.
    """
    return _state(root, pid, "memory", _MEMORY, ("oom_kill", "oom_kills"), "limit_bytes")


def process_state(root: str = "/") -> dict[str, int]:
    """Return how often a process or thread was ``refused`` here, and the ``limit`` of their number.

    Reads the control group of this process, as ``memory_state`` does.
    """
    return _state(root, "self", "pids", _PROCESSES, ("max", "refused"), "limit")


def _state(
    root: str,
    pid: int | str,
    controller: str,
    files: "dict[int, tuple[str, str]]",
    event: "tuple[str, str]",
    limit: str,
) -> dict[str, int]:
    """Return the count of an event and the lowest limit for a process, as they are to be named.

    ``event`` is the word in the file of events, and the name of its count.
    """
    word, name = event
    try:
        with open(os.path.join(root, f"proc/{pid}/cgroup")) as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file if line.count(":") > 1]
    except OSError:
        return {}
    state: dict[str, int] = {}
    for _, controllers, path in entries:
        if controller in controllers.split(","):
            folder, version = os.path.join(root, "sys/fs/cgroup", controller), 1
        elif not controllers and not state:
            folder, version = os.path.join(root, "sys/fs/cgroup"), 2
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            here = os.path.join(folder, *parts[:depth])
            events_file, limit_file = (os.path.join(here, name) for name in files[version])
            words = _read(events_file).split()
            if word in words and name not in state:
                state[name] = int(words[words.index(word) + 1])
            text = _read(limit_file).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                state[limit] = min(int(text), state.get(limit, int(text)))
    return state


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
