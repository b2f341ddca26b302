"""Restarts of a job, their pauses, and lost hosts."""

from __future__ import annotations

import signal
import threading

import pytest

from poprun_py.launching.restart import (
    backoff_seconds,
    pause,
    run_with_restarts,
)
from poprun_py.running.supervise.job import LaunchResult


def test_job_is_run_again_with_growing_pauses():
    runs, pauses = [], []

    def run(count):
        runs.append(count)
        return LaunchResult(exit_code=count < 3, may_restart=count < 3)

    result = run_with_restarts(run, 5, lambda *_: None, pauses.append)
    assert (runs, pauses) == ([0, 1, 2, 3], [1.0, 2.0, 4.0])
    assert (result.exit_code, result.restart_count) == (0, 3)


def test_restarts_are_used_up():
    result = run_with_restarts(
        lambda _: LaunchResult(exit_code=7, may_restart=True),
        2,
        lambda *_: None,
        lambda _: None,
    )
    assert (result.exit_code, result.restart_count) == (7, 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_signal_between_two_runs_ends_the_job(number, code):
    result = run_with_restarts(
        lambda _: LaunchResult(exit_code=7, hung=(1,), may_restart=True),
        2,
        lambda *_: None,
        lambda _: number,
    )
    assert (result.exit_code, result.hung, result.restart_count) == (code, (), 0)
    assert result.reason == f"{number.name} received before restart 1"


def test_pause_tells_of_the_signal_that_ended_it():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.pthread_kill(threading.get_ident(), number)
        assert pause(20) == signal.SIGTERM
        assert not signal.sigpending() & {signal.SIGTERM, signal.SIGUSR2}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert pause(0.001) == 0


def test_pause_has_an_end():
    assert backoff_seconds(1000) == 60.0


def test_a_restart_that_no_time_is_left_for_is_neither_told_nor_waited_for():
    told = []
    result = run_with_restarts(
        lambda _: LaunchResult(exit_code=7, may_restart=True),
        5,
        lambda _, restart, seconds: told.append((restart, seconds)),
        lambda _: 0,
        has_time=lambda seconds: seconds < 4,
    )
    assert told == [(1, 1.0), (2, 2.0)]
    assert (result.exit_code, result.restart_count) == (7, 2)
