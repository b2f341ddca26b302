"""Leases are extended after the server could not run for a while."""

from __future__ import annotations

import pytest

from poprun_py.command.pods.pod_server import LeaseExtender


@pytest.mark.parametrize(
    ("times", "renewed"),
    [
        ((0, 1, 2, 3, 9), 0),  # it runs, and is busy for a while
        ((0, 1, 12, 13, 14), 1),  # it was stopped for 11 s of 30
        ((0, 100, 200, 201), 2),
    ],
)
def test_all_leases_are_renewed_after_a_pause(times, renewed):
    clock = iter(times)
    calls = []
    extender = LeaseExtender(calls.append, 30.0, now=lambda: next(clock))
    for _ in times[1:]:
        extender.tick()
    assert calls == [30.0] * renewed
