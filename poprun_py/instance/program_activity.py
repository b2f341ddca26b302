"""Measures a program's CPU time, memory, traffic and waiting.

progress_memory.py reads the steps that a program counts itself. The wrapper imports this module
only after its program has started.
"""

import os
import time
from struct import Struct

from poprun_py import process_info
from poprun_py.instance.quick_imports import socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from poprun_py.instance.progress_memory import ProgressMemory
    from poprun_py.instance.python_stacks import PythonStacks

# A waiting program uses less than 5 % of one CPU, unless it waits in a busy loop.
BUSY_SHARE = 0.05

_MAX_PROCESSES = 64
# System calls of x86-64 and 64-bit ARM that read standard input or wait for it, as pairs of the
# call's number and first argument in /proc/PID/syscall. The first argument of read is the
# descriptor 0. The first argument of select and pselect6 is the highest descriptor plus one.
_READING = frozenset(
    {(b"0", b"0x0"), (b"23", b"0x1"), (b"270", b"0x1"), (b"63", b"0x0"), (b"72", b"0x1")}
)
# System calls of x86-64 and 64-bit ARM that wait for a disk or a file server: fsync, fdatasync,
# msync, sync, syncfs and sync_file_range.
_SYNCING = frozenset(
    {
        *(b"74", b"75", b"26", b"162", b"306", b"277"),
        *(b"82", b"83", b"227", b"81", b"267", b"84"),
    }
)
_IO = ("rchar", "wchar", "read_bytes", "write_bytes")
_MEMORY = ("RssAnon", "RssFile", "RssShmem", "VmSwap")


def resource_usage(program: int) -> "dict[str, Any]":
    """Return the resources that a program and its descendants used, and the program's delays.

    Returns:
        A dictionary. ``cpu_seconds``, ``memory_bytes`` and ``swap_bytes`` are sums over the program
        and its descendants; shared memory is counted once. ``cpus`` are the CPUs that the program
        may use. ``queued_seconds`` is the time when the main thread of the busiest process was
        ready to run but lacked a CPU. ``throttled_seconds`` is the time when the CPU limit of the
        control group stopped the program. Unknown values are 0.
    """
    pids = process_info.process_tree(program)[:_MAX_PROCESSES]
    used = {pid: _cpu_seconds(pid) for pid in pids}
    sizes = [_memory_sizes(pid) for pid in pids]
    shared = max(files + memory for _, files, memory, _ in sizes)
    try:
        cpus = sorted(os.sched_getaffinity(program))
    except OSError:  # the program has just ended
        cpus = []
    return {
        "cpu_seconds": sum(used.values()),
        "memory_bytes": sum(private for private, *_ in sizes) + shared,
        "swap_bytes": sum(swap for *_, swap in sizes),
        "cpus": cpus,
        "queued_seconds": _queued_seconds(max(pids, key=used.__getitem__)),
        "throttled_seconds": process_info.throttled_seconds(),
    }


class ActivitySampler:
    """Samples the activity of a program that counts no steps, so that a hang can be detected."""

    def __init__(self, memory: "ProgressMemory", stacks: "PythonStacks", program: int) -> None:
        self._memory = memory
        self._stacks = stacks
        self._program = program
        self._last: dict[str, Any] = {}
        self._tcp = TcpTraffic()
        self._at_disk: set[int] = set()  # the threads that waited for a disk in the last sample

    def sample(self, written: int) -> "dict[str, Any]":
        """Return a sample of the activity of a program that has written ``written`` bytes.

        Returns:
            A dictionary with the attributes of ``ActivitySample`` (activity_monitor.py). ``away``,
            the seconds without Python code, is measured only if the program uses CPU time and shows
            no other activity.
        """
        pids = process_info.process_tree(self._program)[:_MAX_PROCESSES]
        waiting, before = set[int]().union(*map(_threads_at_disk, pids)), self._at_disk
        self._at_disk = waiting
        sample: dict[str, Any] = {
            "at": time.monotonic(),
            "awake_seconds": sum(_cpu_seconds(pid) + _queued_seconds(pid) for pid in pids),
            "moved_bytes": sum(map(_moved_bytes, pids)),
            "received_bytes": self._tcp.num_bytes(pids),
            "written": written,
            "call": self._memory.last_collective(),
            "waits": self._memory.waits(),
            "saves": self._memory.saves()
            # A thread other than a main thread must wait for a disk in two successive samples,
            # because an occasional log line is not progress.
            or bool(waiting.intersection(pids) or waiting & before),
            "stopped": process_info.state_letter(self._program) in "Tt",
            "ending": self._stacks.has_left_python(self._program),
            "joined": self._memory.progress() is not None,
            "reads": _waits_for_input(pids),
        }
        ask = self._is_only_busy(sample)
        sample["away"] = self._stacks.seconds_outside_python(pids, ask=ask)
        self._last = sample
        return sample

    def _is_only_busy(self, sample: "dict[str, Any]") -> bool:
        """Return whether CPU time is the program's only activity since the last sample."""
        last = self._last
        if not last or sample["written"] != last["written"]:
            return False
        if sample["call"][:3] != last["call"][:3]:
            return False
        used = sample["awake_seconds"] - last["awake_seconds"]
        return bool(used > BUSY_SHARE * (sample["at"] - last["at"]))


def _waits_for_input(pids: "list[int]") -> bool:
    """Return whether a process of the program waits for the program's own standard input."""
    for pid in pids:
        words = (process_info.read_file(pid, "syscall") or b"").split()[:2]
        if tuple(words) in _READING:
            try:
                own, given = (os.stat(f"/proc/{each}/fd/0") for each in (pid, pids[0]))
            except OSError:
                continue
            # A descendant of the program may have another stdin, such as a pipe.
            if (own.st_dev, own.st_ino) == (given.st_dev, given.st_ino):
                return True
    return False


def _threads_at_disk(pid: int) -> set[int]:
    """Return the threads of a process that wait for a disk or a file server."""
    return {thread for thread in process_info.threads(pid) if _waits_for_disk(pid, thread)}


def _waits_for_disk(pid: int, thread: int) -> bool:
    stat = process_info.read_stat(pid, thread)
    if stat is None or stat.state != "S":
        return stat is not None and stat.state == "D"
    call = process_info.read_file(pid, f"task/{thread}/syscall") or b""
    return call.partition(b" ")[0] in _SYNCING


def _cpu_seconds(pid: int) -> float:
    stat = process_info.read_stat(pid)
    return 0.0 if stat is None else stat.cpu_seconds


def _queued_seconds(pid: int) -> float:
    """Return how many seconds a process's main thread was ready to run but lacked a CPU."""
    fields = (process_info.read_file(pid, "schedstat") or b"").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _moved_bytes(pid: int) -> int:
    """Return how many bytes a process has read and written, with disk transfers counted twice."""
    fields = process_info.read_fields(pid, "io")
    return sum(int(fields.get(name, "0")) for name in _IO)


def _memory_sizes(pid: int) -> list[int]:
    """Return a process's bytes of private memory, of mapped files, of shared memory and of swap."""
    status = process_info.read_fields(pid, "status")
    return [int(status.get(name, "0").split()[0]) * 1024 for name in _MEMORY]


# --- TCP traffic, which the kernel reports through sock_diag(7) -----------------------------------

# Constants from linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/tcp.h.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_TCP_INFO = 2
_ESTABLISHED_AND_CLOSING = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
# struct nlmsghdr (size, type, flags, sequence, process id), struct inet_diag_req_v2 (family,
# protocol, extensions, states, socket), and struct nlattr (size, type).
_HEADER, _REQUEST, _ATTRIBUTE = Struct("=IHHII"), Struct("=BBBxI48x"), Struct("=HH")
# The size of struct inet_diag_msg, and the offset of the socket's inode in it.
_MESSAGE_BYTES, _INODE_OFFSET, _INODE = 72, 68, Struct("=I")
# The attribute tcp_info contains the numbers of acknowledged and of received bytes.
_COUNTERS_OFFSET, _COUNTERS = 4 + 120, Struct("=QQ")
_CHUNK, _SECONDS = 1 << 18, 0.2


class TcpTraffic:
    """Counts the bytes that the TCP connections of some processes have carried."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._moved = 0

    def num_bytes(self, pids: "Iterable[int]") -> int:
        """Return a count of sent and received bytes; only its growth between calls is meaningful.

        If a connection ends between two calls, the last bytes of the connection are not counted.
        """
        inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
        if not inodes:
            return self._moved
        counts = {inode: count for inode, count in _tcp_bytes() if inode in inodes}
        self._moved += sum(max(0, n - self._seen.get(inode, 0)) for inode, n in counts.items())
        self._seen = counts
        return self._moved


def _socket_inodes(pid: int) -> "list[int]":
    """Return the inode numbers of the sockets that a process has open."""
    inodes = []
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return []
    for descriptor in descriptors:
        try:
            target = os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.append(int(target[8:-1]))
    return inodes


def _tcp_bytes() -> "Iterator[tuple[int, int]]":
    """Yield the socket's inode and the carried bytes of each TCP connection in this namespace."""
    try:
        kernel = socket.socket(16, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)  # 16 is AF_NETLINK
    except OSError:
        return
    try:
        # The kernel might not answer, so reading from the socket has a time-out.
        kernel.settimeout(_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            kernel.sendall(_request(family))
            yield from _answers(kernel)
    except OSError:
        return
    finally:
        kernel.close()


def _request(family: int) -> bytes:
    """Return the request that asks the kernel for the open and closing TCP connections."""
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _TCP_INFO - 1, _ESTABLISHED_AND_CLOSING)
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + body


def _answers(kernel: "socket.socket") -> "Iterator[tuple[int, int]]":
    """Yield the socket's inode and the carried bytes of each connection in the kernel's answer."""
    while data := kernel.recv(_CHUNK):
        offset = 0
        while offset + _HEADER.size <= len(data):
            size, kind, *_ = _HEADER.unpack_from(data, offset)
            if kind in (_DONE, _ERROR) or size < _HEADER.size:
                return
            message = data[offset + _HEADER.size : offset + size]
            count = _bytes_of(message)
            if count is not None:
                yield _INODE.unpack_from(message, _INODE_OFFSET)[0], count
            offset += size + 3 & ~3


def _bytes_of(message: bytes) -> "int | None":
    """Return how many bytes a TCP connection carried; None if ``message`` lacks tcp_info."""
    offset = _MESSAGE_BYTES
    while offset + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, offset)
        if kind == _TCP_INFO and size >= _COUNTERS_OFFSET + _COUNTERS.size:
            acked, received = _COUNTERS.unpack_from(message, offset + _COUNTERS_OFFSET)
            return int(acked + received)
        offset += max(_ATTRIBUTE.size, size + 3 & ~3)
    return None
