"""What a wrapper can see of its program's use of the host: CPU, memory, files, what holds it up.

Reads files below /proc and /sys, and asks the kernel how much the program's TCP connections carry.
Standard library only and cheap to import. Nothing here knows the program's steps: that is
progress_memory.py.
"""

import os
import time

from poprun_py import process_info
from poprun_py.instance import sockets

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from poprun_py.instance.progress_memory import ProgressMemory

# A program that waits uses less of one CPU than this, however it does so but by spinning.
BUSY_SHARE = 0.05

_MAX_PROCESSES = 64
_KIB = 1024
# As the kernel shows it: system calls of x86-64 and of 64-bit ARM, and their first argument. What a
# process reads from, or one more than the highest descriptor that it waits for.
_READING = frozenset(
    {(b"0", b"0x0"), (b"23", b"0x1"), (b"270", b"0x1"), (b"63", b"0x0"), (b"72", b"0x1")}
)
# System calls of the same machines that wait for a disk or a file server: fsync, fdatasync, msync,
# sync, syncfs and sync_file_range.
_SYNCING = frozenset(
    {
        *(b"74", b"75", b"26", b"162", b"306", b"277"),
        *(b"82", b"83", b"227", b"81", b"267", b"84"),
    }
)
_IO = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")
_STATUS = ("RssAnon", "RssFile", "RssShmem", "VmSwap")


def observe(program: int) -> "dict[str, Any]":
    """Return what the program and its descendants use by now, and how long they were held up.

    Returns:
        ``cpu_seconds`` of all of them; ``memory_bytes``, shared memory counted once;
        ``swap_bytes``; ``cpus`` that the program may run on; ``queued_seconds`` in which the main
        thread of the busiest one was ready to run but had no CPU; ``throttled_seconds`` in which
        the control group was not allowed to run. What is not known is 0 or absent.
    """
    found: dict[str, Any] = {"throttled_seconds": _throttled_seconds()}
    cpu_seconds, own, shared, swap = 0.0, 0, 0, 0
    busiest, queued = -1.0, 0.0
    for pid in process_info.process_tree(program)[:_MAX_PROCESSES]:
        used = _cpu_seconds(pid)
        cpu_seconds += used
        sizes = _sizes(pid)
        own += sizes[0]
        shared = max(shared, sizes[1] + sizes[2])
        swap += sizes[3]
        if used > busiest:
            busiest, queued = used, _queued_seconds(pid)
    found.update(
        cpu_seconds=cpu_seconds, memory_bytes=own + shared, swap_bytes=swap, queued_seconds=queued
    )
    try:
        found["cpus"] = sorted(os.sched_getaffinity(program))
    except OSError:  # it has just ended
        found["cpus"] = []
    return found


class SignsOfLife:
    """What moves in a program that counts no steps, in one look after the other.

    Args:
        memory: shared with the program.
        program: its process.
    """

    def __init__(self, memory: "ProgressMemory", program: int) -> None:
        self._memory = memory
        self._program = program
        self._last: dict[str, Any] = {}
        self._sockets = sockets.SocketBytes()
        self._at_disk: set[int] = set()  # threads that waited for a disk at the last look

    def look(self, written: int) -> "dict[str, Any]":
        """Return what there is to see now.

        Args:
            written: bytes of output by now.

        Returns:
            ``at``, a time in seconds; ``awake_seconds``, of CPU time and of waiting for a CPU, and
            ``moved_bytes`` of files, pipes and disk by now; ``received_bytes`` of TCP, sent ones
            included; ``written``; the last collective, ``call``, as ``ProgressMemory`` has it;
            whether the program ``waits`` in one; whether it ``saves``: it says so, or a thread
            waits for a disk; whether it is ``stopped``; whether it is ``ending``: its interpreter
            shuts down and runs no more Python; whether it has ``joined`` the others, and may
            count steps; whether it ``reads``: it waits for what the user types; and for how many
            seconds it is ``away``: its main thread has run no Python. Only a program that uses CPU
            time, and shows no other activity, is asked for that.
        """
        awake, moved, pids = _spent(self._program)
        waiting, before = set[int]().union(*map(_threads_at_disk, pids)), self._at_disk
        self._at_disk = waiting
        look: dict[str, Any] = {
            "at": time.monotonic(),
            "awake_seconds": awake,
            "moved_bytes": moved,
            "received_bytes": self._sockets.num_bytes(pids),
            "written": written,
            "call": self._memory.call(),
            "waits": self._memory.waits(),
            "saves": self._memory.saves()
            # A thread other than a main one must wait at two looks: a log line now and then is no
            # progress.
            or bool(waiting.intersection(pids) or waiting & before),
            "stopped": process_info.state_letter(self._program) in "Tt",
            "ending": self._memory.has_left_python(self._program),
            "joined": self._memory.progress() is not None,
            "reads": _waits_for_input(pids),
        }
        look["away"] = self._memory.away_seconds(pids, ask=self._is_only_busy(look))
        self._last = look
        return look

    def _is_only_busy(self, look: "dict[str, Any]") -> bool:
        """Tell whether the program has used CPU time since the last look, and done no more."""
        last = self._last
        if not last or look["written"] != last["written"] or look["call"][:3] != last["call"][:3]:
            return False
        used = look["awake_seconds"] - last["awake_seconds"]
        return bool(used > BUSY_SHARE * (look["at"] - last["at"]))


def _waits_for_input(pids: "list[int]") -> bool:
    """Tell whether a process waits for the standard input that the program was given."""
    for pid in pids[:_MAX_PROCESSES]:
        words = (process_info.read_file(pid, "syscall") or b"").split()[:2]
        if tuple(words) in _READING:
            try:
                own, given = (os.stat(f"/proc/{each}/fd/0") for each in (pid, pids[0]))
            except OSError:
                continue
            # Helpers of a program read what it writes to them.
            if (own.st_dev, own.st_ino) == (given.st_dev, given.st_ino):
                return True
    return False


def _threads_at_disk(pid: int) -> set[int]:
    """Return the threads of a process that wait for a disk or a file server."""
    return {thread for thread in process_info.threads(pid) if _waits_for_disk(pid, thread)}


def _waits_for_disk(pid: int, thread: int) -> bool:
    stat = process_info.read_stat(pid, thread)
    if stat is not None and stat.state == "S":
        call = process_info.read_file(pid, f"task/{thread}/syscall") or b""
        return call.partition(b" ")[0] in _SYNCING
    return stat is not None and stat.state == "D"


def _spent(program: int) -> "tuple[float, int, list[int]]":
    """Return what the program and its descendants have used by now, and their process ids.

    Returns:
        The seconds of CPU time, and those in which their main threads were ready to run while
        others had the CPU; the bytes that they read and wrote, with files and pipes by system
        calls, and with the disk: only differences mean anything.
    """
    pids = process_info.process_tree(program)[:_MAX_PROCESSES]
    awake = sum(_cpu_seconds(pid) + _queued_seconds(pid) for pid in pids)
    return awake, sum(map(_moved_bytes, pids)), pids


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _cpu_seconds(pid: int) -> float:
    stat = process_info.read_stat(pid)
    return 0.0 if stat is None else stat.cpu_seconds


def _moved_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written."""
    lines = (process_info.read_file(pid, "io") or b"").splitlines()
    values = {name: int(value) for name, _, value in (line.partition(b":") for line in lines)}
    return sum(values.get(name, 0) for name in _IO)


def _sizes(pid: int) -> list[int]:
    """Return the bytes of a process's own memory, of mapped files, shared memory and swap."""
    status = process_info.read_status(pid)
    return [int(status[name].split()[0]) * _KIB if name in status else 0 for name in _STATUS]


def _queued_seconds(pid: int) -> float:
    """Return how long a process's main thread was ready to run while others had the CPU."""
    fields = (process_info.read_file(pid, "schedstat") or b"").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _throttled_seconds(root: str = "/") -> float:
    """Return how long this control group, or one above it, had used up its share of CPU time."""
    seconds = 0.0
    for line in _read(os.path.join(root, "proc/self/cgroup")).decode().splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = os.path.join(root, "sys/fs/cgroup", "cpu" if controllers else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            words = _read(os.path.join(base, *parts[:depth], "cpu.stat")).split()
            values = dict(zip(words[::2], words[1::2], strict=False))  # names and numbers in turn
            if b"throttled_usec" in values:  # version 2
                seconds = max(seconds, int(values[b"throttled_usec"]) / 1e6)
            elif b"throttled_time" in values:  # version 1
                seconds = max(seconds, int(values[b"throttled_time"]) / 1e9)
    return seconds
