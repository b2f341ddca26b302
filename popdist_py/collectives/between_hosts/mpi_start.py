"""The start of MPI, where an instance meets all others for the first time, and the end of MPI.

Nothing here communicates: importing mpi4py's MPI initialises it, which does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["start_mpi"]

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_SLACK_NANOSECONDS = 25_000_000


def start_mpi(num_local_instances: int) -> None:
    """Initialise MPI; returns when all instances of the job have come.

    Args:
        num_local_instances: those that share this host's cores.
    """
    # What takes an instance long comes before the meeting: the others would wait for it twice.
    import popdist_py.collectives.within_host.host_group  # noqa: F401

    cores_are_short = num_local_instances > (os.cpu_count() or 1)
    with _rare_wakeups() if cores_are_short else contextlib.nullcontext():
        _import_mpi()


def _import_mpi() -> None:
    """Import mpi4py's MPI so that only this process finalises it, and not its forked children.

    By default mpi4py also calls ``MPI_Finalize`` when a child exits, and the child hangs in it.
    """
    import mpi4py

    finalises = mpi4py.rc.finalize is not False and "mpi4py.MPI" not in sys.modules
    if finalises:
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    pid = os.getpid()

    def finalise() -> None:
        if os.getpid() == pid and not MPI.Is_finalized():
            MPI.Finalize()

    if finalises:
        atexit.register(finalise)


@contextlib.contextmanager
def _rare_wakeups() -> Iterator[None]:
    """Let the kernel wake this thread from short sleeps some 25 milliseconds late.

    A thread that starts meanwhile begins likewise, and goes back with this one where the kernel
    lets this process say so (CAP_SYS_NICE); otherwise its timers stay late, not its other events.

    Open MPI's first meeting looks every 100 microseconds. Of 64 instances on two cores, those that
    wait would leave little of the cores to those that they wait for.
    """
    prctl = ctypes.CDLL(None).prctl
    before, threads = prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0), _threads()
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)
    try:
        yield
    finally:
        # A negative answer is no setting; 0 is the setting that the thread began with.
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(max(0, before)), 0, 0, 0)
        for thread in _threads() - threads:
            with contextlib.suppress(OSError):
                Path(f"/proc/{thread}/timerslack_ns").write_text(str(max(0, before)))


def _threads() -> set[str]:
    """Return the threads of this process; none where the kernel does not show them."""
    with contextlib.suppress(OSError):
        return {path.name for path in Path("/proc/self/task").iterdir()}
    return set()
