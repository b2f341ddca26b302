"""Running a job again after a failure: how often, when, and on which hosts.

Decides and waits; what a run is comes as a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from poprun_py.job import LaunchResult

__all__ = ["backoff_seconds", "lost_hosts", "run_with_restarts"]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def backoff_seconds(restart: int) -> float:
    """Return the pause before restart 1, 2, ...: 1 s, doubled each time, at most a minute."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(restart - 1, 10))


def run_with_restarts(
    run: Callable[[int], LaunchResult],
    max_restarts: int,
    failed: Callable[[LaunchResult, int, float], None],
    sleep: Callable[[float], None] = time.sleep,
) -> LaunchResult:
    """Call ``run(restart_count)`` until it ends well or may not be started again.

    Args:
        run: one run of the job.
        max_restarts: how often it may be started again.
        failed: told of a failure with the number of the coming restart and the pause before it.
        sleep: waits for some seconds.
    """
    count = 0
    while True:
        result = replace(run(count), restart_count=count)
        if not result.may_restart or count >= max_restarts:
            return result
        count += 1
        pause = backoff_seconds(count)
        failed(result, count, pause)
        sleep(pause)


def lost_hosts(result: LaunchResult, host_of: Callable[[int], str]) -> frozenset[str]:
    """Return the hosts all of whose instances vanished without a word.

    Args:
        result: how the run ended.
        host_of: names the planned host of an instance.
    """
    lost: dict[str, bool] = {}
    for instance in result.instances:
        name = host_of(instance.index)
        gone = instance.was_lost or instance.code is None
        lost[name] = lost.get(name, True) and gone
    return frozenset(name for name, gone in lost.items() if gone)
