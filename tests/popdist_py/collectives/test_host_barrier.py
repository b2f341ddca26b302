"""The time before a waiting instance sleeps, and the end of waits for lost instances."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from popdist_py.collectives.waiting import WaitLimits
from popdist_py.collectives.within_host import host_barrier
from popdist_py.collectives.within_host.host_barrier import HostBarrier, Peer
from popdist_py.errors import InstanceLostError


@pytest.fixture
def sleeps(monkeypatch):
    """Return a function that tells whether an instance sleeps until the other one arrives."""

    def of(arrives_after: float, *, cores_are_short: bool, yield_seconds: float = 1e-5) -> bool:
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(host_barrier, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        barrier = HostBarrier(
            np.zeros(HostBarrier.size(2), np.uint8), [Peer(0, 1), Peer(1, 2)], 0,
            cores_are_short=cores_are_short, limits=WaitLimits(10),
        )  # fmt: skip
        calls = []

        def arrive() -> None:
            barrier._words[8] = 1

        def pass_on() -> None:
            clock.now += yield_seconds
            if clock.now >= arrives_after:
                arrive()

        def sleep(*_: object) -> None:
            calls.append("futex")
            arrive()

        barrier._yield, barrier._futex = pass_on, sleep
        barrier.wait_for_all("a call")
        return bool(calls)

    return of


def test_with_a_core_of_its_own_an_instance_looks_for_some_milliseconds(sleeps):
    assert not sleeps(4e-3, cores_are_short=False)
    assert sleeps(6e-3, cores_are_short=False)


def test_where_cores_are_short_it_sleeps_soon(sleeps):
    assert not sleeps(0.2e-3, cores_are_short=True)
    assert sleeps(1e-3, cores_are_short=True)


def test_it_sleeps_where_others_want_its_core(sleeps):
    assert sleeps(4e-3, cores_are_short=False, yield_seconds=0.5e-3)


@pytest.fixture
def barriers():
    """Return the barriers of three instances of one host, all of them in this process."""
    memory = np.zeros(HostBarrier.size(3), np.uint8)
    peers = [Peer(index, os.getpid()) for index in range(3)]
    made = [
        HostBarrier(memory, peers, position, cores_are_short=True, limits=WaitLimits(0.4))
        for position in range(3)
    ]
    yield made
    for barrier in made:
        barrier.close()


def test_one_that_left_is_named_while_another_that_is_slow_is_waited_for(barriers):
    barriers[2].close()
    with pytest.raises(InstanceLostError, match=r"instance 2 \(process \d+\) has left the group"):
        barriers[0].wait_for_all("a call")
    assert barriers[0].lost_instance == 2


def test_one_that_left_in_good_order_and_ended_made_fewer_calls(barriers, monkeypatch):
    monkeypatch.setattr(HostBarrier, "_has_ended", lambda *_: True)
    barriers[2].close()
    monkeypatch.setattr(barriers[0], "_missing", lambda _: [2 * 8])
    with pytest.raises(InstanceLostError, match=r"instance 2 .* ended without making this call"):
        barriers[0].wait_for_all("a call")


def test_one_that_arrived_and_left_is_not_missed(barriers):
    barriers[2]._words[2 * 8] = 1
    barriers[2].close()
    with pytest.raises(
        InstanceLostError, match=r"instance 1 .* did not make this call within 0.4 s"
    ):
        barriers[0].wait_for_all("a call")
