"""What stands in the files of the folder, as values: leases and tickets, with their JSON.

The files are written by others, perhaps by strangers: what cannot be understood is no lease. Pure.
Every launch waits for this module: its tuples are made in an eighth of the time of data classes.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

_VERSION = 1
# Runs are compared by name, so their names must not be cut. No run name is longer than this.
_MAX_NAME, _MAX_RUN_NAME = 80, 128
MAX_NUMBER = (1 << 53) - 1
# As many as the kernel can be built for, and more.
_MAX_CPU = 1 << 16


class Holder(NamedTuple):
    """A job: its launcher's process, the name of its program, and of its run once it has one.

    ``process_start`` is when the process started, in clock ticks since the boot: with it the
    process is the same one, not a later one of the same id.
    """

    pid: int
    process_start: int
    program: str
    run_id: str = ""


class Holding(NamedTuple):
    """The lease of a job. ``since`` is in seconds since the epoch.

    ``user`` owns the file: a number, but a name for an entry of another host.
    ``is_shared``: it was taken although others hold some of the CPUs.
    """

    name: str
    user: str
    holder: Holder
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    since: float
    is_shared: bool = False


class Waiter(NamedTuple):
    """The ticket of a job that waits. The lowest ``number`` is first; of equal ones, the oldest.

    ``outer`` is the lease of the job in one of whose instances it runs; empty for none.
    """

    name: str
    user: str
    holder: Holder
    number: int
    since: float
    outer: str = ""

    @property
    def place(self) -> tuple[int, float, str]:
        """The key by which tickets are sorted."""
        return self.number, self.since, self.name


def text_of(entry: Holding | Waiter) -> str:
    """Return what stands in the file of a lease or a ticket; who owns the file is its user."""
    holder = entry.holder
    data: dict[str, Any] = {
        "version": _VERSION,
        "pid": holder.pid,
        "process_start": holder.process_start,
        "program": holder.program,
        "run_id": holder.run_id,
        "since": entry.since,
    }
    if isinstance(entry, Waiter):
        return json.dumps({**data, "number": entry.number, "outer": entry.outer}) + "\n"
    lists = {
        "cpus": entry.cpus,
        "numa_nodes": entry.numa_nodes,
        "shared": entry.is_shared,
    }
    return json.dumps({**data, **lists}) + "\n"


def holding_of(name: str, user: str, text: bytes) -> Holding | None:
    """Return the lease that ``text`` describes; None if it describes none."""
    try:
        data = _document(text)
        cpus = _indices(data["cpus"])
        if not cpus:
            return None
        return Holding(
            name=name,
            user=user,
            holder=_holder(data),
            cpus=cpus,
            numa_nodes=_indices(data["numa_nodes"]),
            since=_seconds(data["since"]),
            is_shared=data["shared"] is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def waiter_of(name: str, user: str, text: bytes) -> Waiter | None:
    """Return the ticket that ``text`` describes; None if it describes none."""
    try:
        data = _document(text)
        return Waiter(
            name=name,
            user=user,
            holder=_holder(data),
            number=_whole(data["number"]),
            since=_seconds(data["since"]),
            outer=printable(data["outer"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _document(text: bytes) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict) or data["version"] != _VERSION:
        raise ValueError(text)
    return data


def _holder(data: dict[str, Any]) -> Holder:
    return Holder(
        pid=_whole(data["pid"]),
        process_start=_whole(data["process_start"]),
        program=printable(data["program"]),
        run_id=printable(data["run_id"], _MAX_RUN_NAME),
    )


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(value)
    return float(value)


def _indices(value: Any) -> tuple[int, ...]:
    """Return CPUs or NUMA nodes."""
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < _MAX_CPU for n in value):
        raise ValueError(value)
    return tuple(sorted(set(value)))


def printable(value: Any, most: int = _MAX_NAME) -> str:
    """Return a name as it may be printed: a stranger's may hold what a terminal obeys.

    Args:
        value: the name.
        most: how many characters of it to return.

    Raises:
        TypeError: it is no string.
    """
    if not isinstance(value, str):
        raise TypeError(value)
    return "".join(c if c.isprintable() else "?" for c in value[:most])
