"""Wrappers of the next attempt, which become ready while the programs run."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.other_hosts import NextWrappers

NOW = time.monotonic()
NEXT = SimpleNamespace(command=SimpleNamespace(variables=[{"RANK": str(i)} for i in range(4)]))


class Ahead(NextWrappers):
    """The wrappers of instances 2 and 3, which come back to a job with two instances."""

    def __init__(self, job=NEXT, started=None, keeps_state=True, waits=False):
        self.used, self.sent, self.problems, self.stopped = [], [], [], []
        self.has_ended = False
        mpirun = SimpleNamespace(
            next_deadline=lambda: float("inf"), on_time=lambda _: None, all_connected=lambda: None,
            has_just_ended=lambda: self.has_ended, stop=self.stopped.append,
        )  # fmt: skip

        def start(job, events):
            if isinstance(started, Exception):
                raise started
            return (mpirun, (2, 3)) if started is None else None

        changes = SimpleNamespace(
            next_job=lambda: job, wait_again=lambda text: self.problems.append(text) or waits
        )
        hosts = SimpleNamespace(changes=changes, keeps_state=keeps_state)
        present = SimpleNamespace(num_instances=2, hosts=hosts)
        super().__init__(present, start, lambda _: None, self.used.append)

    def peer(self, index):
        connection = SimpleNamespace(send=self.sent.append)
        return Peer(index=index, connection=connection, host="node1", pid=1, is_for_next=True)


def test_the_hosts_are_used_when_all_wrappers_are_ready():
    ahead = Ahead()
    ahead.begin("node1 is back")
    ahead.begin("node2 is back")  # is used together with the first host
    for index, instance in ((2, "2"), (3, "3")):
        ahead.connected(ahead.peer(index))
        kind, payload = ahead.sent[-1][:1], json.loads(ahead.sent[-1][5:])
        assert (kind, payload) == (control_protocol.PREPARE, {"variables": {"RANK": instance}})
        assert not ahead.used
        ahead.received(ahead.peer(index), control_protocol.PREPARED, index == 3)
    ahead.on_time(NOW + 1000)
    assert ahead.used == ["node1 is back"]


@pytest.mark.parametrize(
    "problem",
    [
        {"keeps_state": False},
        {"job": None},
        {"started": False},
        {"started": StartError("cannot run mpirun")},
    ],
    ids=["no states", "no plan", "nothing to start", "no mpirun"],
)
def test_hosts_whose_wrappers_cannot_be_started_are_used_at_once(problem):
    ahead = Ahead(**problem)
    ahead.begin("node1 is back")
    assert ahead.used == ["node1 is back"]
    assert ahead.next_deadline() == float("inf")


def late(ahead):
    ahead.on_time(NOW + 1000)


def vanished(ahead):
    ahead.disconnected(ahead.peer(2))


def failed(ahead):
    ahead.has_ended = True
    ahead.on_time(NOW)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("end", [late, vanished, failed])
def test_a_host_whose_wrappers_do_not_start_is_awaited_again_if_possible(end, waits):
    ahead = Ahead(waits=waits)
    ahead.begin("node1 is back")
    ahead.connected(ahead.peer(2))
    ahead.on_time(time.monotonic())
    assert not ahead.used
    end(ahead)
    end(ahead)
    assert len(ahead.problems) == 1
    assert ahead.used == ([] if waits else ["node1 is back"])
    assert len(ahead.stopped) == waits  # else the next attempt uses the wrappers


def test_hosts_are_used_without_spares_that_take_too_long():
    ahead = Ahead(waits=True)
    ahead.begin("node1 is back")
    for index in (2, 3):
        ahead.connected(ahead.peer(index))
    failed(ahead)  # mpirun is not needed any longer
    assert not ahead.used
    late(ahead)
    assert ahead.used == ["node1 is back"]
