"""The pauses before restarts: their lengths, and the wait, which signals end."""

from __future__ import annotations

import os
import signal
import time

from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.running.supervise.signal_pipe import PARENT_ENDED

FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def backoff_seconds(restart: int) -> float:
    """Return the seconds to wait before a restart: 1, then 2, 4 and so on, at most 60."""
    return min(_LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(restart - 1, 10))


def has_made_progress(result: LaunchResult) -> bool:
    """Return whether an instance has done a training step since the attempt began."""
    found = (each.progress for each in result.instances)
    return any(each is not None and each.step > each.resumed for each in found)


def was_killed(result: LaunchResult) -> bool:
    """Return whether another process or the loss of a host ended the first instance that failed."""
    first = result.first_failure
    if first is None:
        return False
    return first.was_lost or (first.code == -signal.SIGKILL and not first.oom_kills)


def pause(seconds: float, parent: int) -> int:
    """Wait before a restart; return 0, or the number of the signal that ended the wait.

    SIGUSR2 is meant for the user's programs. No program runs before a restart, so SIGUSR2 is
    ignored. If the process ``parent``, which started the launcher, ends, the number of SIGHUP is
    returned. A signal that has arrived since the end of the attempt ends a pause of 0 seconds too.
    """
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, PARENT_ENDED}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.add(signal.SIGHUP)
    end = time.monotonic() + seconds
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        while got := signal.sigtimedwait(numbers, max(0.0, end - time.monotonic())):
            if got.si_signo == signal.SIGUSR2:
                continue
            if got.si_signo != PARENT_ENDED:
                return got.si_signo
            if os.getppid() != parent:  # the end of a thread of the parent sends PARENT_ENDED too
                return signal.SIGHUP
        return 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
