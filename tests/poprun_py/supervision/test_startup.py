"""What keeps a job of several hosts from starting: values, without any host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poprun_py.errors import StartError
from poprun_py.supervision.startup import Startup

NEVER = float("inf")


def peers(*hosts):
    """Return instances that run on ``hosts``."""
    return {index: SimpleNamespace(host=host) for index, host in enumerate(hosts)}


@pytest.mark.parametrize("planned", [("a", "b"), ("", "b"), ("", ""), ()])
def test_instances_on_their_hosts_start(planned):
    assert Startup(planned, None).misplaced(peers("a", "b")) is None


def test_an_instance_on_another_host_is_refused_with_both_names():
    problem = Startup(("a", "b"), None).misplaced(peers("a", "c"))
    assert problem.startswith("instance 1 is on host c, planned on b: ")


def test_a_start_that_takes_long_is_looked_into_until_a_reason_is_found():
    reasons = ["", "", "host b: it does not answer"]

    def explain():
        if reason := reasons.pop(0):
            raise StartError(reason)

    startup = Startup(("a", "b"), explain)
    now, waits, problems = 0.0, [], []
    startup.begin(now)
    for _ in range(3):
        waits.append(startup.next_deadline() - now)
        assert startup.on_time(now) is None
        now = startup.next_deadline()
        problems.append(startup.on_time(now))
    assert problems == [None, None, "host b: it does not answer"]
    assert waits[0] < waits[1] < waits[2]
    assert startup.next_deadline() == NEVER


def test_a_job_that_is_complete_is_not_looked_into():
    def explain():
        raise AssertionError("nothing was to be asked")

    startup = Startup(("a",), explain)
    startup.begin(0.0)
    startup.end()
    assert startup.on_time(1e9) is None


def test_a_job_of_this_machine_is_not_looked_into():
    startup = Startup((), None)
    startup.begin(0.0)
    assert startup.next_deadline() == NEVER
