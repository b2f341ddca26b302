"""Small facts about Linux processes: descendants, groups, parent-death signals.

Standard library only and cheap to import: the wrapper in front of every program uses it, and so
does the supervisor. ctypes is imported where a system call has no other name.
"""

import os

from poprun_py import process_info
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


def stop_descendants(pid: int) -> list[int]:
    """Stop all descendants of ``pid``; returns those that were not stopped before."""
    stopped: list[int] = []
    # What was started meanwhile is found by the next look.
    while running := [
        each
        for each in process_info.descendants(pid)
        if each not in stopped and process_info.state_letter(each) not in "TtZX"
    ]:
        for each in running:
            # SIGTSTP does nothing to the leader of a session.
            signal_process(each, signal.SIGSTOP)
        stopped += running
    return stopped


def end_daemon_of_mpi() -> None:
    """Ask the daemon of Open MPI that started this process to end, if it has no other child.

    One that cannot reach mpirun any more waits for its network for a quarter of an hour.
    """
    parent = os.getppid()
    is_daemon = (process_info.read_file(parent, "comm") or b"").strip() in (b"prted", b"orted")
    if is_daemon and process_info.children_by_parent().get(parent) == [os.getpid()]:
        signal_process(parent, signal.SIGTERM)
