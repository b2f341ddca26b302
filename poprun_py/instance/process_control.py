"""Signals to processes, limits, orphaned processes, and stopping with a grace time.

The supervisor and the wrapper in front of every program import this module, so it imports little.
ctypes is imported only by the functions whose system call Python does not offer.
"""

import os

from poprun_py import process_info
from poprun_py.instance.quick_imports import signal

TYPE_CHECKING = False  # not imported from typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def _prctl(option: int, value: object) -> bool:
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Let this process adopt orphaned descendants; return whether it did so already."""
    import ctypes

    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return bool(before.value)


def end_as_subreaper() -> None:
    """Leave orphaned descendants to init again."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the parent ends; end now if the parent has already ended."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def signal_when_parent_ends(number: int) -> int | None:
    """Ask the kernel for a signal when the process that waits for this one ends.

    Some processes are meant to outlive their parent: under nohup, as a background job of a script
    (which ignores SIGINT), and as the leader of a session. They ask for nothing. Neither does a job
    of an interactive shell, because the shell or the kernel sends it SIGHUP unless the user has
    disowned it.

    Returns:
        The parent's process id; None if no signal was asked for.
    """
    parent = os.getppid()
    outlives = any(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGINT))
    if outlives or parent <= 1 or os.getsid(0) == os.getpid() or _is_job_of_shell(parent):
        return None
    return parent if _prctl(_PR_SET_PDEATHSIG, int(number)) else None


def _is_job_of_shell(parent: int) -> bool:
    """Return whether a shell at a terminal has given this process its own process group."""
    try:
        is_own_group = os.getpgid(parent) != os.getpgrp()
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return is_own_group


def raise_open_files() -> tuple[int, int]:
    """Raise this process's limit of open files as far as allowed; return (soft, hard) of before."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_open_files((limits[1], limits[1]))
    return limits


def set_open_files(limits: tuple[int, int]) -> bool:
    """Set the (soft, hard) limit of open files; return whether the kernel accepts it."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    except (OSError, ValueError):
        return False
    return True


def signal_process(pid: int, number: int) -> bool:
    """Send a signal to one process; return whether that was possible."""
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


def suspend_descendants(pid: int) -> list[int]:
    """Stop all descendants of ``pid`` by SIGSTOP; return the processes that were running."""
    stopped: list[int] = []
    # Processes that were started meanwhile are found by the next pass.
    while running := [
        each
        for each in process_info.descendants(pid)
        if each not in stopped and process_info.state_letter(each) not in "TtZX"
    ]:
        for each in running:
            # The leader of a session ignores SIGTSTP.
            signal_process(each, signal.SIGSTOP)
        stopped += running
    return stopped


def end_mpi_daemon() -> None:
    """Ask Open MPI's daemon that started this process to end, if this is its only child.

    A daemon that has lost mpirun otherwise waits for its network for a quarter of an hour.
    """
    parent = os.getppid()
    is_daemon = (process_info.read_file(parent, "comm") or b"").strip() in (b"prted", b"orted")
    if is_daemon and process_info.children_by_parent().get(parent) == [os.getpid()]:
        signal_process(parent, signal.SIGTERM)


class GracefulStop:
    """Stops a program or a job. It asks once, waits, and forces the end when the time is over.

    The supervisor stops mpirun and the instances in this way, and each wrapper its program. The
    caller gives the time, as seconds of ``time.monotonic``.

    Args:
        ask: The function that asks for the end.
        force: The function that kills.
        repeat_seconds: The time between calls of ``force``; by default it is called once.
    """

    def __init__(
        self,
        ask: "Callable[[], None]",
        force: "Callable[[], None]",
        repeat_seconds: float = float("inf"),
    ) -> None:
        self.asked_at: float | None = None
        self._ask = ask
        self._force = force
        self._repeat_seconds = repeat_seconds
        self._force_at = float("inf")

    def begin(self, now: float, grace_seconds: float = float("inf")) -> None:
        """Ask, unless that was done before, and force after ``grace_seconds``."""
        self.force_after(grace_seconds, now)
        if self.asked_at is None:
            self.asked_at = now
            self._ask()

    def force_after(self, seconds: float, now: float) -> None:
        """Force after ``seconds``, or sooner if an earlier call demands it. Does not ask."""
        self._force_at = min(self._force_at, now + seconds)

    def next_deadline(self) -> float:
        """Return when ``on_time`` must be called; inf for never."""
        return self._force_at

    def on_time(self, now: float) -> None:
        """Call ``force`` if the time is over."""
        if now >= self._force_at:
            self._force_at = now + self._repeat_seconds
            self._force()
