"""The starter: the process that mpirun starts in jobs with checkpoints in memory.

If mpirun ends, or loses a daemon or a host, MPI kills the processes that it has started. The
starter therefore forks the wrapper into a session of its own, in which MPI finds no process. After
the loss, only starters are gone, and the wrappers go on under the launcher.
"""

import os

from poprun_py.instance.quick_imports import signal

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Callable

_IGNORED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
)


def leave_mpirun(close_connection: "Callable[[], None]") -> None:
    """Fork the wrapper, in which this function returns; the starter ends after the wrapper.

    In the starter, ``close_connection`` closes the connection to the launcher.
    """
    pid = os.fork()
    if pid == 0:
        os.setsid()
        # MPI waits until all processes have closed the output of the starter.
        null = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(null, each)
        os.close(null)
        return
    close_connection()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.waitpid(pid, 0)
    # mpirun must not see a failure, because it would kill the starters of the other wrappers.
    os._exit(0)
