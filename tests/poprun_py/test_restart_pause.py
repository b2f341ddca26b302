"""The pause before a restart, within the time limit of the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from poprun_py import attempts
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.supervision.job import Job


@pytest.mark.parametrize(
    ("limit", "not_counted", "waited"),
    [(None, 0.0, 8.0), (10.0, 0.0, 1.0), (10.0, 5.0, 6.0), (5.0, 0.0, -4.0)],
)
def test_a_pause_ends_with_the_time_limit(monkeypatch, limit, not_counted, waited):
    clock = [100.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attempts, "pause", lambda seconds: seconds)
    plan = SimpleNamespace(config=LaunchConfig(program=("true",), timeout=limit))
    recording = SimpleNamespace(begin=lambda *_: None, end=lambda _: None, run_id="r")
    console = SimpleNamespace(log=None, warn=None)
    running = attempts.Attempts(plan, recording, console, (1, 2), None)
    nothing = Job(command=(), variables=(), environ={})
    monkeypatch.setattr(attempts, "job_of", lambda *_, **__: nothing)
    # The user was in the debugger for a while, or had stopped the job.
    result = SimpleNamespace(paused_seconds=not_counted)
    monkeypatch.setattr(attempts, "supervise", lambda *_, **__: result)
    running.run(0)
    clock[0] += 9.0
    assert running.pause(8.0) == pytest.approx(waited)
