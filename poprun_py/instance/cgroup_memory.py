"""The memory limit of a control group, and how often the kernel killed in it for want of memory.

Reads files only. Standard library only and cheap to import.
"""

import os

__all__ = ["memory_state"]


def memory_state(root: str = "/", pid: int | str = "self") -> dict[str, int]:
    """Return how often the kernel killed for want of memory here, and the memory limit in bytes.

    Reads the control group of ``pid``, version 2 or 1, below ``root``; what is not known is absent.
    """
    try:
        with open(os.path.join(root, f"proc/{pid}/cgroup")) as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file if line.count(":") > 1]
    except OSError:
        return {}
    state: dict[str, int] = {}
    for _, controllers, path in entries:
        if "memory" in controllers.split(","):
            folder = os.path.join(root, "sys/fs/cgroup/memory")
            _read_group(folder, path, "memory.oom_control", "memory.limit_in_bytes", state)
        elif not controllers and not state:
            folder = os.path.join(root, "sys/fs/cgroup")
            _read_group(folder, path, "memory.events", "memory.max", state)
    return state


def _read_group(folder: str, path: str, events: str, limit: str, state: dict[str, int]) -> None:
    """Add the kills of one control group and the lowest limit on the way up from it."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        here = os.path.join(folder, *parts[:depth])
        words = _read(os.path.join(here, events)).split()
        if "oom_kill" in words and "oom_kills" not in state:
            state["oom_kills"] = int(words[words.index("oom_kill") + 1])
        text = _read(os.path.join(here, limit)).strip()
        if text.isdigit() and int(text) < 1 << 60:
            state["limit_bytes"] = min(int(text), state.get("limit_bytes", int(text)))


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
