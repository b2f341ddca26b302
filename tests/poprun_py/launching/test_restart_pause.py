"""Whether the time limit of a job leaves anything after the pause before a restart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.launcher.jobs import a_job

from poprun_py.launching import attempts
from poprun_py.launching.run_record import AttemptRecord
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.running.supervise.launch_result import LaunchResult

TOLD = (
    "the job is not restarted: its time limit of {:g} s leaves {:.1f} s, but the pause "
    "before a restart takes 8 s"
)


@pytest.mark.parametrize(
    ("limit", "not_counted", "left"),
    [(None, 0.0, None), (20.0, 0.0, None), (10.0, 0.0, 1.0), (12.0, 6.0, None), (5.0, 0.0, 0.0)],
)
def test_a_job_without_time_after_the_pause_is_not_announced(monkeypatch, limit, not_counted, left):
    clock = [100.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    plan = SimpleNamespace(
        config=LaunchConfig(program=("true",), timeout=limit), topology=SimpleNamespace(hosts=())
    )
    recording = SimpleNamespace(
        begin=lambda *_: AttemptRecord("r"), end=lambda _: None, prepare=None, prepare_page=None
    )
    warned = []
    console = SimpleNamespace(log=None, warn=warned.append)
    running = attempts.Attempts(plan, recording, console)
    nothing = a_job((), 0)
    monkeypatch.setattr(attempts, "job_of", lambda *_, **__: nothing)
    # The user was in the debugger for a while, or had stopped the job.
    result = LaunchResult(exit_code=1, paused_seconds=not_counted)
    monkeypatch.setattr(attempts, "supervise", lambda *_, **__: result)
    running.run_once(0)
    clock[0] += 9.0
    assert running.has_time(8.0) == (left is None)
    assert warned == ([] if left is None else [TOLD.format(limit, left)])
