"""The trace of a whole run: of all attempts, also when the last one did not start."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.plans import plan_with_folder
from support.trace_tables import query

from poprun_py.errors import StartError
from poprun_py.launching import attempts
from poprun_py.launching.job_timeline import JobTimeline
from poprun_py.launching.run_record import RunRecord
from poprun_py.running.supervise.launch_result import LaunchResult


def failing(job):
    """Run an attempt that records nothing."""
    (job.files.spans / "instance-0.ended").write_text("1")
    return LaunchResult(exit_code=1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run whose attempts can be run: they call ``run.supervise``."""
    plan = plan_with_folder(tmp_path / "out", {"POPRUN_RUN_ID": "mine"}, timeline="auto")
    console = KeptConsole()
    record = RunRecord(plan, console)
    found = SimpleNamespace(
        console=console,
        record=record,
        timeline=record._timeline,
        folder=tmp_path / "out" / "mine",
        attempts=attempts.Attempts(plan, record, console),
    )
    monkeypatch.setattr(attempts, "supervise", lambda job, **_: found.supervise(job))
    yield found
    record.__exit__(None, None, None)


def test_attempts_before_one_that_does_not_start_are_in_the_trace(run):
    def does_not_start(job):
        raise StartError("no mpirun")

    run.supervise = failing
    run.attempts.run_once(0)
    run.supervise = does_not_start
    with pytest.raises(StartError), run.record:
        run.attempts.run_once(1)
    path = run.folder / "timeline.json.gz"
    assert query(path, "SELECT name FROM process") == [("instance 0 (attempt 1)",)]
    (warning,) = run.console.of("warn")
    assert warning == (
        f"timeline: {path}: 0 spans, because the program used none of the operations that a "
        "timeline records: calls of PopTorch models, loops with an optimizer of torch, "
        "collectives of popdist_py, and popdist_py.span()"
    )
    assert run.console.of("tell") == []
    report = json.loads((run.folder / "report.json").read_text())
    assert (report["state"], report["timeline"]) == ("ended", "timeline.json.gz")


def test_of_many_restarts_the_last_attempts_are_kept(run):
    """Each takes its share of the disk."""

    run.supervise = failing
    for count in range(10):
        run.attempts.run_once(count)
    assert len(list(run.folder.glob("attempt-*/spans"))) == 8
    merged = run.timeline.finish()
    told = run.timeline.sentence(replace(merged, num_spans=1))
    assert "1 span; only the last 8 attempts are included; open" in told
    names = [name for (name,) in query(merged.path, "SELECT name FROM process ORDER BY pid")]
    assert names == [f"instance 0 (attempt {number})" for number in range(3, 11)]


def test_the_trace_of_an_earlier_launch_of_the_run_is_kept(run):
    for name in ("timeline.json.gz", "timeline-1.json.gz"):
        (run.folder / name).write_text(name)
    (run.folder / "attempt-1").mkdir()
    run.supervise = failing
    run.attempts.run_once(0)
    merged = run.timeline.finish()
    kept = {path.name: path.read_text() for path in run.folder.glob("timeline-*")}
    assert kept == {
        "timeline-1.json.gz": "timeline-1.json.gz",
        "timeline-2.json.gz": "timeline.json.gz",
    }
    assert query(merged.path, "SELECT name FROM process") == [("instance 0 (attempt 2)",)]


def test_a_job_that_never_started_has_no_trace(run):
    def does_not_start(job):
        raise StartError("no mpirun")

    run.supervise = does_not_start
    with pytest.raises(StartError), run.record:
        run.attempts.run_once(0)
    assert run.console.of("tell") == []
    assert not (run.folder / "timeline.json.gz").exists()
    assert json.loads((run.folder / "report.json").read_text())["timeline"] is None


def test_a_restart_has_a_folder_although_that_of_the_first_attempt_was_removed(tmp_path):
    plan = plan_with_folder(None, timeline=str(tmp_path / "t.json.gz"))
    with contextlib.closing(JobTimeline(plan, None)) as timeline:
        first = timeline.begin(plan, None).folder
        shutil.rmtree(first.parent)  # by a program that removes old files from /tmp
        second = timeline.begin(plan, None).folder
        (second / "instance-0.ended").write_text("1")
        assert second.parent.stat().st_mode & 0o777 == 0o700
        timeline.finish()
    assert query(tmp_path / "t.json.gz", "SELECT name FROM process") == [
        ("instance 0 (attempt 2)",)
    ]
    assert not second.parent.exists()


@pytest.mark.parametrize("is_off", [False, True])
def test_an_empty_trace_is_explained(tmp_path, is_off):
    plan = plan_with_folder(
        None, timeline=str(tmp_path / "t.json"), env=("POPDIST_COUNT_STEPS=no",) * is_off
    )
    with contextlib.closing(JobTimeline(plan, None)) as timeline:
        (timeline.begin(plan, None).folder / "instance-0.ended").write_text("1")
        said = timeline.sentence(timeline.finish())
    end = (
        "popdist_py.span(); POPDIST_COUNT_STEPS=no turns off the recording of loops with an "
        "optimizer of torch"
    )
    assert ("calls of PopTorch models, loops with an optimizer of torch, " in said) != is_off
    assert said.endswith(end) == is_off


def test_a_trace_that_is_replaced_is_told(tmp_path):
    path = tmp_path / "t.json"
    plan = plan_with_folder(None, timeline=str(path))
    for said in (f"timeline: {path}: 0 spans", f"timeline: {path} (replaced): 0 spans"):
        with contextlib.closing(JobTimeline(plan, None)) as timeline:
            (timeline.begin(plan, None).folder / "instance-0.ended").write_text("1")
            assert timeline.sentence(timeline.finish()).startswith(said)
