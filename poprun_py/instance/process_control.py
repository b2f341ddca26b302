"""Process control by signals, limits of open files, and the adoption of orphans.

Python does not offer the system call prctl, so ``load_prctl`` calls it in the C library.
"""

import os

from poprun_py import process_info
from poprun_py.instance.quick_imports import load_prctl, signal

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


# The result of ``load_prctl``; empty before the first call. The wrapper and the program that it
# forks call prctl once each.
_loaded: "list[tuple[Callable[..., int], type, Callable[[Any], object]]]" = []


def _functions() -> "tuple[Callable[..., int], type, Callable[[Any], object]]":
    if not _loaded:
        _loaded.append(load_prctl())
    return _loaded[0]


def _prctl(option: int, value: int) -> bool:
    prctl, _, _ = _functions()
    return prctl(option, value, 0, 0, 0) == 0


def become_subreaper() -> bool:
    """Let this process adopt orphaned descendants; return whether it did so before."""
    prctl, number, reference = _functions()
    before = number()
    prctl(_PR_GET_CHILD_SUBREAPER, reference(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return bool(before.value)


def end_as_subreaper() -> None:
    """Stop adopting orphaned descendants, so that the init process adopts them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its parent ends; exit if the parent has ended."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def signal_when_parent_ends(number: int) -> int | None:
    """Let the kernel signal this process when its parent ends, unless it is to outlive the parent.

    Processes under nohup, background jobs of a script (which ignore SIGINT) and leaders of a
    session are to outlive their parent. A job of an interactive shell gets SIGHUP from the shell or
    the kernel instead, unless the user has disowned the job.

    Returns:
        The parent's process id; None if no signal was requested.
    """
    parent = os.getppid()
    outlives = any(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGINT))
    if outlives or parent <= 1 or os.getsid(0) == os.getpid() or _is_job_of_shell(parent):
        return None
    return parent if _prctl(_PR_SET_PDEATHSIG, int(number)) else None


def _is_job_of_shell(parent: int) -> bool:
    """Return whether a shell at a terminal started this process in a process group of its own."""
    try:
        is_own_group = os.getpgid(parent) != os.getpgrp()
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return is_own_group


def raise_open_files() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit; return the old pair of limits."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_open_files((limits[1], limits[1]))
    return limits


def set_open_files(limits: tuple[int, int]) -> None:
    """Set the (soft, hard) limit of open files, if the kernel accepts it."""
    import resource

    try:  # noqa: SIM105 (importing contextlib would delay the start of every instance)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    except (OSError, ValueError):
        pass


def signal_process(pid: int, number: int) -> bool:
    """Send a signal to one process; return whether the kernel sent the signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group ``pid``; if there is no such group, to process ``pid``."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        signal_process(pid, number)


def suspend_descendants(pid: int) -> list[int]:
    """Suspend all descendants of ``pid`` by SIGSTOP; return the newly suspended processes."""
    stopped: list[int] = []
    # Processes that start during one pass of the loop are found in the next pass.
    while running := [
        each
        for each in process_info.descendants(pid)
        if each not in stopped and process_info.state_letter(each) not in "TtZX"
    ]:
        for each in running:
            # SIGTSTP is not used, because the leader of a session ignores it.
            signal_process(each, signal.SIGSTOP)
        stopped += running
    return stopped


def end_mpi_daemon(daemon: int, child: int) -> None:
    """Ask the Open MPI daemon ``daemon`` to end, if ``child`` is the daemon's only child process.

    A daemon that has lost its connection to mpirun would otherwise wait for 15 minutes.
    """
    is_daemon = (process_info.read_file(daemon, "comm") or b"").strip() in (b"prted", b"orted")
    if is_daemon and process_info.children_by_parent().get(daemon) == [child]:
        signal_process(daemon, signal.SIGTERM)
