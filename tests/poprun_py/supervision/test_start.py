"""What keeps a job of several hosts from starting: values, without any host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poprun_py.errors import StartError
from poprun_py.supervision.alarms import Alarms
from poprun_py.supervision.startup import Start


def start(planned, found, explain=None):
    """Return the start of a job whose instances are where ``found`` says, and its refusals."""
    peers = {index: SimpleNamespace(host=host) for index, host in enumerate(found)}
    control = SimpleNamespace(peers=peers, is_complete=len(found) == len(planned))
    refused = []
    alarms = Alarms()
    return Start(planned, control, alarms, explain, refused.append), alarms, refused


@pytest.mark.parametrize("planned", [("a", "b"), ("", "b"), ("", ""), ()])
def test_instances_on_their_hosts_start(planned):
    job, _, refused = start(planned, ("a", "b"))
    assert job.is_as_planned()
    assert refused == []


def test_an_instance_on_another_host_is_refused_with_both_names():
    job, _, refused = start(("a", "b"), ("a", "c"))
    assert not job.is_as_planned()
    assert len(refused) == 1
    assert refused[0].startswith("instance 1 is on host c, planned on b: ")


def test_a_start_that_takes_long_is_looked_into_until_a_reason_is_found():
    reasons = ["", "", "host b: it does not answer"]

    def explain():
        if reason := reasons.pop(0):
            raise StartError(reason)

    job, alarms, refused = start(("a", "b"), ("a",), explain)
    job.look_later()
    waits = []
    for _ in range(3):
        waits.append(alarms.wait_limit(0.0))
        assert not refused
        alarms.ring(float("inf"))
    assert refused == ["host b: it does not answer"]
    assert waits[0] < waits[1] < waits[2]
    assert alarms.wait_limit(0.0) == float("inf")


def test_a_job_that_is_complete_is_not_looked_into():
    def explain():
        raise AssertionError("nothing was to be asked")

    job, alarms, refused = start(("a",), ("a",), explain)
    job.look_later()
    alarms.ring(float("inf"))
    assert refused == []


def test_a_job_of_this_machine_is_not_looked_into():
    job, alarms, _ = start((), ())
    job.look_later()
    assert alarms.wait_limit(0.0) == float("inf")
