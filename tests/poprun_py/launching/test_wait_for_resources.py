"""The time limit and the messages of a wait, with a clock that only a wait moves."""

from __future__ import annotations

import pytest
from support.launcher.consoles import KeptConsole

from poprun_py.errors import StartError
from poprun_py.launching import wait_for_resources
from poprun_py.launching.wait_for_resources import BusyError, Wait
from poprun_py.options.launch_config import LaunchConfig


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time; sleeping moves it."""
    now = [100.0]
    monkeypatch.setattr(wait_for_resources.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(wait_for_resources.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


def wait_of(limit):
    console = KeptConsole()
    return Wait(LaunchConfig(program=("x",), wait_for_resources=limit), console), console


def busy(count, reason, seconds=3):
    """Return a function that raises BusyError in its first ``count`` calls."""
    answers = iter([BusyError("taken", reason, seconds)] * count)

    def take():
        for error in answers:
            raise error
        return "taken"

    return take


def test_waits_for_cores_and_ipus_have_one_limit(clock):
    wait, console = wait_of(5)
    assert wait.until(busy(1, "for CPUs")) == "taken"
    clock[0] += 1000  # the job is not waiting
    assert (wait.seconds, wait.is_over) == (3, False)
    with pytest.raises(
        StartError, match=r"^taken \(the time of wait_for_resources=5 is " r"over\)$"
    ):
        wait.until(busy(9, "for IPUs"))
    assert (wait.seconds, wait.is_over) == (5, True)
    assert console.waits == [(0, "for CPUs"), (3, ""), (3, "for IPUs"), (5, "")]


def test_the_end_of_no_wait_is_not_told(clock):
    wait, console = wait_of("forever")
    assert wait.until(lambda: "free") == "free"
    assert (console.waits, wait.is_over) == ([], False)


def test_a_job_that_may_not_wait_is_refused_at_once(clock):
    wait, console = wait_of(None)
    assert wait.is_over
    with pytest.raises(StartError, match=r"^taken$"):
        wait.until(busy(1, "for CPUs"))
    assert (console.waits, clock) == ([], [100.0])
