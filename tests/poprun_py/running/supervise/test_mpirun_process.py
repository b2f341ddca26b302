"""The process that starts the wrappers, with ``sleep`` in its place."""

from __future__ import annotations

import os
import selectors
import signal
import time

import pytest
from support.processes import wait_until

from poprun_py.running.supervise.mpirun_process import Mpirun


@pytest.fixture
def mpirun():
    with selectors.DefaultSelector() as selector:
        running = Mpirun(
            ("sleep", "30"),
            os.environ,
            "a mark that is in no environment",
            selector,
            lambda _: None,
            (1024, 1024),
            network=None,
            end_signal=signal.SIGHUP,
        )
        yield running
        running.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_a_signal_sent_to_mpirun_is_kept_from_it_and_found(mpirun, number):
    assert mpirun.signal_kept(time.monotonic()) == 0
    os.kill(mpirun.pid, number)
    wait_until(lambda: mpirun.signal_kept(time.monotonic()) == number)
    assert not mpirun.has_just_ended()
    mpirun.stop(time.monotonic())
    wait_until(mpirun.has_just_ended)
    assert mpirun.code == -signal.SIGHUP
    assert mpirun.signal_kept(time.monotonic() + 10) == 0
