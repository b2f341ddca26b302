"""State, relatives, CPU time and command of processes, and limits of their control groups.

The functions read /proc and /sys. For a process that has ended, or that the system hides from this
user, the functions return None or an empty value. This module imports only os, because further
imports would delay the start of every instance.
"""

import os

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_PAGE_BYTES = 4096
_MAX_COMMAND = 80
_MAX_THREADS = 64


class ProcessStat:
    """The fields of /proc/PID/stat that this package uses; proc(5) describes the file."""

    def __init__(self, fields: list[bytes]) -> None:
        # The state letter, such as R (running), S (sleeping), T (stopped) or Z (ended).
        self.state = fields[0].decode()
        self.is_alive = self.state not in "ZX"
        self.parent = int(fields[1])
        self.group = int(fields[2])
        # The CPU seconds of the process and of its children that have ended.
        self.cpu_seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        self.start_ticks = int(fields[19])  # clock ticks since boot


def read_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """Return the stat fields of a process, or of one of its threads."""
    name = "stat" if thread is None else f"task/{thread}/stat"
    # The command name, which the file shows in parentheses, may itself contain parentheses.
    fields = (read_file(pid, name) or b"").rpartition(b")")[2].split()
    return ProcessStat(fields) if len(fields) > 19 else None


def read_fields(pid: int, name: str) -> dict[str, str]:
    """Return the fields of a file such as /proc/PID/status as a dictionary from name to value."""
    lines = (read_file(pid, name) or b"").decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def read_file(pid: int, name: str, *, first_page: bool = False) -> bytes | None:
    """Return the content of the file ``name`` in /proc/PID; None if it cannot be read.

    With ``first_page``, only the first 4 KiB are read, because reading a whole file may take long.
    """
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(_PAGE_BYTES if first_page else -1)
    except OSError:
        return None


def variable(pid: int, name: str) -> str:
    """Return the value that an environment variable had when a process started; empty if unset."""
    for entry in (read_file(pid, "environ") or b"").split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key == os.fsencode(name):
            return os.fsdecode(value)
    return ""


def owner(pid: int) -> int | None:
    """Return the id of the user who owns a process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """Return the start time of a living process, in clock ticks since boot."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


def state_letter(pid: int) -> str:
    """Return the state letter of a process; Z if it has ended."""
    stat = read_stat(pid)
    return "Z" if stat is None else stat.state


def state_and_handler(pid: int, number: int) -> tuple[str, bool]:
    """Return a process's state letter, and whether it handles a signal, at the same moment."""
    status = read_fields(pid, "status")
    return status.get("State", "Z")[0], number in _signals(status.get("SigCgt", ""))


def blocks_signal(pid: int, number: int) -> bool:
    """Return whether the main thread of a process blocks a signal."""
    return number in _signals(read_fields(pid, "status").get("SigBlk", ""))


def pending_signals(pid: int) -> set[int]:
    """Return the signals that were sent to a process but that the process still blocks."""
    status = read_fields(pid, "status")
    return _signals(status.get("ShdPnd", "")) & _signals(status.get("SigBlk", ""))


def _signals(mask: str) -> set[int]:
    bits = int(mask or "0", 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def all_stats() -> "Iterator[tuple[int, ProcessStat]]":
    """Yield the process id and the stat fields of every process that this user can see."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                yield int(name), stat


def children_by_parent() -> dict[int, list[int]]:
    """Return a dictionary from each process to its living children, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for pid, stat in all_stats():
        if stat.is_alive:
            children.setdefault(stat.parent, []).append(pid)
    return children


def descendants(pid: int) -> list[int]:
    """Return all living descendants of a process, parents before children."""
    children = children_by_parent()
    pids: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        current = waiting.pop()
        pids.append(current)
        waiting += children.get(current, ())
    return pids


def ancestors(pid: int) -> list[int]:
    """Return all ancestors of a process, the parent first."""
    found: list[int] = []
    stat = read_stat(pid)
    while stat is not None and stat.parent > 0:
        found.append(stat.parent)
        stat = read_stat(stat.parent)
    return found


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants, parents first.

    If /proc lists the children of each thread, the cost does not grow with the number of processes
    on the host, and the result includes ended processes that were not collected.
    """
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return [pid, *descendants(pid)]
    pids = [pid]
    for each in pids:  # the loop also visits the processes appended to ``pids``
        for thread in threads(each):
            pids += map(int, (read_file(each, f"task/{thread}/children") or b"").split())
    return pids


def threads(pid: int) -> list[int]:
    """Return the ids of at most 64 threads of a process."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")[:_MAX_THREADS]]
    except OSError:
        return []


def has_children(pid: int, without: int = 0) -> bool:
    """Return whether a process's main thread has a living child process other than ``without``."""
    listed = read_file(pid, f"task/{pid}/children")
    if listed is None:
        return any(child != without for child in children_by_parent().get(pid, ()))
    children = (int(child) for child in listed.split())
    return any(child != without and start_ticks(child) is not None for child in children)


def command_line(pid: int) -> str:
    """Return a process's command line, or its name if the line is empty, cut to 80 characters.

    The result is ``?`` if the command line cannot be read.
    """
    words = read_file(pid, "cmdline", first_page=True)
    name = read_file(pid, "comm")
    if words is None or name is None:
        return "?"
    text = (words.rstrip(b"\0").replace(b"\0", b" ") or name.strip()).decode(errors="replace")
    text = "".join(each if each.isprintable() else " " for each in text)
    return text if len(text) <= _MAX_COMMAND else f"{text[: _MAX_COMMAND - 3]}..."


# --- control groups, of version 1 or version 2 ----------------------------------------------------

# Control groups of version 1 without a limit show a number near 2 ** 63.
_NO_LIMIT = 1 << 60


_MEMORY_EVENTS = ("memory.events", "memory.oom_control")
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")


def memory_kills(root: str = "/") -> int:
    """Return how many processes the kernel killed at the memory limit; 0 if it does not report it.

    ``root`` is the folder that contains ``proc`` and ``sys``.
    """
    return _event_count(_folders(root, "memory"), "oom_kill", _MEMORY_EVENTS)


def memory_kills_and_limit(root: str = "/") -> "tuple[int, int | None]":
    """Return how many processes the kernel killed at the memory limit, and the limit in bytes.

    If the kernel does not report the numbers, they are 0 and None.
    """
    folders = list(_folders(root, "memory"))
    count = _event_count(folders, "oom_kill", _MEMORY_EVENTS)
    return count, _lowest_limit(folders, _MEMORY_LIMITS)


def process_refusals_and_limit(root: str = "/") -> "tuple[int, int | None]":
    """Return how often the kernel refused a new process at the limit of processes, and the limit.

    If the kernel does not report the numbers, they are 0 and None.
    """
    folders = list(_folders(root, "pids"))
    count = _event_count(folders, "max", ("pids.events",))
    return count, _lowest_limit(folders, ("pids.max",))


def throttled_seconds(root: str = "/") -> float:
    """Return how many seconds this process could not run because its CPU quota was used up."""
    seconds = 0.0
    for folder in _folders(root, "cpu"):
        words = _text(folder, "cpu.stat").split()
        # In the file cpu.stat, each name is followed by its number.
        values = dict(zip(words[::2], words[1::2], strict=False))
        if "throttled_usec" in values:  # control groups of version 2 count microseconds
            seconds = max(seconds, int(values["throttled_usec"]) / 1e6)
        elif "throttled_time" in values:  # control groups of version 1 count nanoseconds
            seconds = max(seconds, int(values["throttled_time"]) / 1e9)
    return seconds


def busy_seconds(path: str = "/proc/stat") -> dict[int, float]:
    """Return for each CPU of the machine how long any process or interrupt has used it.

    In a virtual machine, the time that the hypervisor gave to other machines (steal) is included.
    If the file cannot be read, the result is empty.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            cpus = [line for line in file.read().splitlines() if line.startswith(b"cpu")]
        lines = [line.split() for line in cpus if line[3:4] != b" "]
        # The numbers are: user, nice, system, idle, iowait, irq, softirq, steal.
        ticks = os.sysconf("SC_CLK_TCK")
        return {
            int(name[3:]): (sum(map(int, used[:3])) + sum(map(int, used[5:8]))) / ticks
            for name, *used in lines
        }
    except (OSError, ValueError):
        return {}


def _event_count(folders: "Iterable[str]", event: str, files: "Sequence[str]") -> int:
    """Return how often an event occurred in the first of ``folders`` that counts the event.

    The files are that of control groups version 2 and, if there is one, that of version 1.
    """
    for folder in folders:
        words = _text(folder, *files).split()
        if event in words:
            return int(words[words.index(event) + 1])
    return 0


def _lowest_limit(folders: "Iterable[str]", files: "Sequence[str]") -> "int | None":
    """Return the lowest limit in the files of ``folders``; None if there is no limit."""
    texts = [_text(folder, *files).strip() for folder in folders]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _folders(root: str, controller: str) -> "Iterator[str]":
    """Yield each folder of this process's control group and its parent groups."""
    lines = _text(root, "proc/self/cgroup").splitlines()
    entries = [line.split(":", 2) for line in lines if line.count(":") > 1]
    # A controller, such as "memory", exists only in one of the two versions of control groups.
    named = [each for each in entries if controller in each[1].split(",")]
    for _, controllers, path in named or [each for each in entries if not each[1]]:
        base = os.path.join(root, "sys/fs/cgroup", controller if controllers else "")
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield os.path.join(base, *parts[:depth])


def _text(folder: str, *names: str) -> str:
    """Return the content of the first readable file of ``names``; empty if no file is readable."""
    for name in names:
        try:
            # A file object for text would take 11 instead of 8 us, and a wrapper reads many files.
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                return os.fsdecode(file.read())
        except OSError:
            continue
    return ""
