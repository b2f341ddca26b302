"""The mpirun process, with ``sleep`` in its place."""

from __future__ import annotations

import os
import selectors
import signal
import time

import pytest
from support.processes import wait_until

from poprun_py.running.supervise.job_description import Command, Job
from poprun_py.running.supervise.mpirun_process import Mpirun


@pytest.fixture
def signals():
    """The signals that were sent to mpirun."""
    return []


@pytest.fixture
def mpirun(signals):
    with selectors.DefaultSelector() as selector:
        command = Command(
            words=("sleep", "30"), environ={}, variables=({},), end_signal=signal.SIGHUP
        )
        running = Mpirun(
            Job(command=command),
            os.environ,
            "a mark that is in no environment",
            selector,
            lambda _: None,
            (1024, 1024),
            signals.append,
        )
        yield running
        running.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_mpirun_blocks_a_signal_and_reports_it(mpirun, signals, number):
    mpirun.on_time(time.monotonic())
    assert signals == []
    os.kill(mpirun.pid, number)
    wait_until(lambda: mpirun.on_time(time.monotonic()) or signals)
    assert signals == [number]
    assert not mpirun.has_just_ended()
    mpirun.stop(time.monotonic())
    wait_until(mpirun.has_just_ended)
    assert mpirun.code == -signal.SIGHUP
    mpirun.on_time(time.monotonic() + 10)
    assert signals == [number]
