"""Restarts of a job after a failure, with growing pauses, and without lost hosts.

The caller passes the function that runs the job.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py.running.supervise.job import LaunchResult

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def backoff_seconds(restart: int) -> float:
    """Return the seconds before a restart: 1 before the first, doubled each time, at most 60."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(restart - 1, 10))


def pause(seconds: float) -> int:
    """Wait before a restart; return the number of the signal that ended the wait, else 0.

    SIGUSR2 is meant for the programs, so it is ignored while no program runs.
    """
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.add(signal.SIGHUP)
    end = time.monotonic() + seconds
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        while (left := end - time.monotonic()) > 0:
            got = signal.sigtimedwait(numbers, left)
            if got is not None and got.si_signo != signal.SIGUSR2:
                return got.si_signo
        return 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_with_restarts(
    run: Callable[[int], LaunchResult],
    max_restarts: int,
    failed: Callable[[LaunchResult, int, float], None],
    sleep: Callable[[float], int] = pause,
    has_time: Callable[[float], bool] = lambda _: True,
) -> LaunchResult:
    """Call ``run(restart_count)`` until the job succeeds or may not be restarted.

    Args:
        run: A function that runs the job once and returns the result.
        max_restarts: The highest allowed number of restarts.
        failed: A function that is called before each restart, with the result of the failed run,
            the number of the restart, and the seconds before the restart.
        sleep: A function that waits for some seconds. It returns the number of a signal that ends
            the job, or 0 if the seconds passed without a signal.
        has_time: A function that returns whether the job may still run after some seconds.
    """
    count = 0
    while True:
        result = replace(run(count), restart_count=count)
        if not result.may_restart or count >= max_restarts:
            return result
        seconds = backoff_seconds(count + 1)
        if not has_time(seconds):
            return result
        count += 1
        failed(result, count, seconds)
        if number := sleep(seconds):
            return _ended_by(result, number, count)


def _ended_by(result: LaunchResult, number: int, restart: int) -> LaunchResult:
    """Return the last run's result, changed to say that a signal ended the job before a restart."""
    return replace(
        result,
        # SIGUSR1 asks for a stop after which the job can be resumed. Between two runs, a job can
        # always be resumed.
        exit_code=RESUME_EXIT_CODE if number == signal.SIGUSR1 else 128 + number,
        reason=f"{signal.Signals(number).name} received before restart {restart}",
        hung=(),
        may_restart=False,
    )
