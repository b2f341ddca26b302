"""How long a wait has lasted."""

from __future__ import annotations

from popdist_py.collectives import waiting


def test_the_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    wait = waiting.WaitTime()
    for _ in range(10):
        now += 0.5
        assert wait.seconds() == now - 100.0
    now += 600.0  # Ctrl-Z, and fg
    assert wait.seconds() == 5.0
    now += 1.0
    assert wait.seconds() == 6.0
