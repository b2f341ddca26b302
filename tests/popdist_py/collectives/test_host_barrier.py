"""How long an instance looks for the others before it sleeps, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from popdist_py.collectives.within_host import host_barrier
from popdist_py.collectives.within_host.host_barrier import HostBarrier, Peer


@pytest.fixture
def sleeps(monkeypatch):
    """Return a function: whether an instance sleeps until the other one arrives."""

    def of(arrives_after: float, *, cores_are_short: bool, yield_seconds: float = 1e-5) -> bool:
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(host_barrier, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        barrier = HostBarrier(
            np.zeros(HostBarrier.size(2), np.uint8), [Peer(0, 1), Peer(1, 2)], 0,
            cores_are_short=cores_are_short, hang_timeout=10,
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
