"""The initialisation of MPI, which waits for all instances of the job, and its finalisation.

Importing ``mpi4py.MPI`` initialises MPI. Except for this initialisation and for MPI's finalisation,
this module does not communicate.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from popdist_py.errors import require_package

__all__ = ["start_mpi"]

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_SLACK_NANOSECONDS = 25_000_000


def start_mpi(num_local_instances: int) -> None:
    """Initialise MPI; return when all instances of the job have initialised MPI.

    Args:
        num_local_instances: Number of instances that share this host's cores.
    """
    # Slow modules are imported before MPI starts, because all instances wait for one another when
    # MPI starts. If the imports came later, the instances would wait for the slowest instance
    # twice.
    import popdist_py.collectives.within_host.host_group  # noqa: F401

    cores_are_short = num_local_instances > (os.cpu_count() or 1)
    with _rare_wakeups() if cores_are_short else contextlib.nullcontext():
        _import_mpi()


def _import_mpi() -> None:
    """Import mpi4py.MPI so that this process finalises MPI, but its forked children do not.

    By default mpi4py also calls ``MPI_Finalize`` when a forked child exits, and the child hangs in
    this call.
    """
    require_package("mpi4py", "popdist_py.init()")
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
    """Let the kernel wake this thread from short sleeps up to 25 milliseconds late.

    Threads that start in the ``with`` block inherit this timer setting. When the block ends, the
    timer setting of these threads is restored if this process has the capability CAP_SYS_NICE.
    Without CAP_SYS_NICE, the timers of these threads stay up to 25 milliseconds late. Other events
    still wake these threads at once.

    Open MPI polls every 100 microseconds while it waits for the other processes. With 64 instances
    on two cores, this polling would leave little CPU time for the instances that have not started
    MPI yet.
    """
    prctl = ctypes.CDLL(None).prctl
    before, threads = prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0), _threads()
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)
    try:
        yield
    finally:
        # A negative ``before`` is an error code, so 0 is set instead, which restores the default
        # timer setting.
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(max(0, before)), 0, 0, 0)
        for thread in _threads() - threads:
            with contextlib.suppress(OSError):
                Path(f"/proc/{thread}/timerslack_ns").write_text(str(max(0, before)))


def _threads() -> set[str]:
    """Return the ids of this process's threads; an empty set if the kernel hides them."""
    with contextlib.suppress(OSError):
        return {path.name for path in Path("/proc/self/task").iterdir()}
    return set()
