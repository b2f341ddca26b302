"""Small facts about Linux processes: descendants, groups, parent-death signals.

Standard library only and cheap to import: the wrapper in front of every program uses it, and so
does the supervisor. ctypes is imported where a system call has no other name.
"""

import os

from poprun_py.instance.quick_imports import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def _prctl(option: int, value: object) -> bool:
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Have orphaned descendants become children of this process; tells whether they did before."""
    import ctypes

    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return bool(before.value)


def end_as_subreaper() -> None:
    """Have orphaned descendants become children of init again, which collects them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``number`` when the parent ends; end now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def tell_when_parent_ends(number: int) -> int | None:
    """Ask the kernel for a signal when the process that waits for this one ends.

    Not asked for where this process is meant to outlive its parent: under nohup, as a background
    job of a script (whose SIGINT is ignored), and as the leader of its own session. Nor is it
    asked for in a job of an interactive shell: the shell, or the kernel, sends SIGHUP to the job
    unless it was disowned.

    Returns:
        The parent's pid; None if nothing was asked for.
    """
    parent = os.getppid()
    kept = any(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGINT))
    if kept or parent <= 1 or os.getsid(0) == os.getpid() or _is_job_of_shell(parent):
        return None
    return parent if _prctl(_PR_SET_PDEATHSIG, int(number)) else None


def _is_job_of_shell(parent: int) -> bool:
    """Tell whether a shell at a terminal has given this process a process group of its own."""
    try:
        is_own_group = os.getpgid(parent) != os.getpgrp()
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return is_own_group


def raise_open_files() -> tuple[int, int]:
    """Let this process open as many files as it may; returns the (soft, hard) limit until now."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_open_files((limits[1], limits[1]))
    return limits


def set_open_files(limits: tuple[int, int]) -> bool:
    """Set the (soft, hard) limit of open files; tells whether the kernel takes it."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    except (OSError, ValueError):
        return False
    return True


def signal_process(pid: int, number: int) -> bool:
    """Send a signal to one process; tells whether it was there."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(pid: int, number: int) -> bool:
    """Send a signal to the process group of ``pid``, or to ``pid`` before it has a group."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return signal_process(pid, number)
    return True


def _children_by_parent() -> dict[int, list[int]]:
    """Return the living processes' pids by parent pid, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name, in parentheses, may hold anything: fields follow the last ")".
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of ``pid``, parents before children."""
    children = _children_by_parent()
    pids: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        current = waiting.pop()
        pids.append(current)
        waiting += children.get(current, ())
    return pids


def stop_descendants(pid: int) -> list[int]:
    """Stop all descendants of ``pid``; returns those that were not stopped before."""
    stopped: list[int] = []
    # What was started meanwhile is found by the next look.
    while running := [
        each
        for each in descendants(pid)
        if each not in stopped and state(each, signal.SIGSTOP)[0] not in "TtZX"
    ]:
        for each in running:
            # SIGTSTP does nothing to the leader of a session.
            signal_process(each, signal.SIGSTOP)
        stopped += running
    return stopped


def has_children(pid: int) -> bool:
    """Tell whether ``pid`` has a living child."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            listed = file.read().split()
    except OSError:
        return bool(_children_by_parent().get(pid))
    return any(_alive(int(child)) for child in listed)


def end_daemon_of_mpi() -> None:
    """Ask the daemon of Open MPI that started this process to end, if it has no other child.

    One that cannot reach mpirun any more waits for its network for a quarter of an hour.
    """
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/comm") as file:
            is_daemon = file.read().strip() in ("prted", "orted")
    except OSError:
        return
    if is_daemon and _children_by_parent().get(parent) == [os.getpid()]:
        signal_process(parent, signal.SIGTERM)


def state(pid: int, number: int) -> tuple[str, bool]:
    """Return a process's state letter ("Z" when it is gone) and whether it catches a signal."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        caught = int(lines[b"SigCgt"], 16)
    except (OSError, KeyError, ValueError):
        return "Z", False
    return lines[b"State"].split()[0].decode(), bool(caught >> (number - 1) & 1)


def command(pid: int) -> str:
    """Return a process's command line, cut to 80 characters, or its name if that is hidden."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(400).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        with open(f"/proc/{pid}/comm", "rb") as file:
            text = words or file.read().strip().decode(errors="replace")
    except OSError:
        return "?"
    text = "".join(each if each.isprintable() else " " for each in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def pending_signals(pid: int) -> set[int]:
    """Return the signals that are pending because a process blocks them; none if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        waiting = int(lines[b"ShdPnd"], 16) & int(lines[b"SigBlk"], 16)
    except (OSError, KeyError, ValueError):
        return set()
    return {number for number in range(1, 65) if waiting >> (number - 1) & 1}


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
