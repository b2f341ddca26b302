"""The pause before a restart, within the time limit of the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poprun_py import launcher
from poprun_py.config.launch_config import LaunchConfig


@pytest.mark.parametrize(
    ("limit", "not_counted", "waited"),
    [(None, 0.0, 8.0), (10.0, 0.0, 1.0), (10.0, 5.0, 6.0), (5.0, 0.0, -4.0)],
)
def test_a_pause_ends_with_the_time_limit(monkeypatch, limit, not_counted, waited):
    clock = [100.0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(launcher, "pause", lambda seconds: seconds)
    plan = SimpleNamespace(config=LaunchConfig(program=("true",), timeout=limit))
    record = SimpleNamespace(begin=lambda *_: None, end=lambda _: None, run_id="r")
    timeline = SimpleNamespace(begin=lambda *_: None)
    recorders = SimpleNamespace(begin=lambda *_: ())
    attempts = launcher._Attempts(plan, record, timeline, recorders, None, (1, 2))
    monkeypatch.setattr(launcher, "_job", lambda *_, **__: None)
    # The user was in the debugger for a while, or had stopped the job.
    result = SimpleNamespace(paused_seconds=not_counted)
    monkeypatch.setattr(launcher, "supervise", lambda *_, **__: result)
    monkeypatch.setattr(attempts, "_console", SimpleNamespace(log=None), raising=False)
    attempts.run(0)
    clock[0] += 9.0
    assert attempts.pause(8.0) == pytest.approx(waited)
