"""What is kept of a run as a whole: opened before it, closed at its end, whatever happens then."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.plans import plan_with_folder

from popdist_py.timeline import merging
from poprun_py.errors import StartError
from poprun_py.launching import attempts, launch_planning
from poprun_py.launching import launch as launch_module
from poprun_py.launching.launch import Request, launch
from poprun_py.launching.run_record import RunRecord
from poprun_py.past_runs.pages import run_page
from poprun_py.python_api import launcher_process
from poprun_py.running.supervise.signal_pipe import HANGUP_ONCE
from poprun_py.terminal import command_name

ENVIRON = {"POPRUN_RUN_ID": "mine", "PATH": os.defpath}


@pytest.fixture
def console():
    return KeptConsole()


@pytest.mark.parametrize(
    ("place", "name", "warning"),
    [
        (
            run_page,
            "page_text",
            "the page of the run is not written, because the launcher was interrupted; to write "
            "the page, run {name} report {run}",
        ),
        (
            merging,
            "merge_files",
            (
                "the timeline is not written, because the launcher was interrupted; to make "
                "the timeline from the recorded spans, run python -m popdist_py.timeline "
                "{run}/attempt-1/spans"
            ),
        ),
    ],
)
def test_ctrl_c_after_the_job_changes_not_how_it_ended(
    tmp_path, monkeypatch, console, place, name, warning
):
    """Of a job of days, page and timeline take a while: who does not wait for them need not."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, interrupted)
    plan = plan_with_folder(tmp_path, ENVIRON, timeline="auto")
    with RunRecord(plan, console) as recording:
        attempt = recording.begin(plan, 0)
        (attempt.spans.folder / "instance-0.ended").write_text("1")
        recording.finish(0, "")
    assert console.of("warn")[-1:] == [warning.format(name=command_name(), run=tmp_path / "mine")]
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert (report["state"], report["exit_code"]) == ("ended", 0)
    assert recording.was_interrupted
    with RunRecord(plan, console):
        pass  # the run's folder is free


@pytest.mark.parametrize(
    ("interrupt", "number", "code"),
    [
        (KeyboardInterrupt(), signal.SIGINT, 130),
        (launcher_process._Stopped(signal.SIGTERM), signal.SIGTERM, 143),
        (launcher_process._Stopped(HANGUP_ONCE), signal.SIGHUP, 129),
        (SystemExit(143), signal.SIGTERM, 143),
    ],
)
def test_a_signal_before_the_job_is_supervised_ends_the_report(
    tmp_path, monkeypatch, console, interrupt, number, code
):
    def interrupted(*_, **__):
        raise interrupt

    monkeypatch.setattr(attempts, "supervise", interrupted)
    plan = plan_with_folder(tmp_path, ENVIRON)
    monkeypatch.setenv("POPRUN_LEASES", "none")
    with pytest.raises(type(interrupt)):
        launch(Request(plan), console)
    report = json.loads((tmp_path / "latest" / "report.json").read_text())
    assert (report["exit_code"], report["attempts"][0]["exit_code"]) == (code, code)
    assert report["attempts"][0]["cause"] == "signal"
    assert report["reason"] == f"{number.name} received while no program was running"


@pytest.mark.parametrize(
    "error", [StartError("the disk is full"), OSError(errno.ENOSPC, "No space left on device", "f")]
)
def test_an_error_before_an_attempt_is_supervised_ends_the_report(
    tmp_path, monkeypatch, console, error
):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(attempts, "_make_folder_of_results", full)
    monkeypatch.setenv("POPRUN_LEASES", "none")
    with pytest.raises(type(error)):
        launch(Request(plan_with_folder(tmp_path, ENVIRON)), console)
    report = json.loads((tmp_path / "latest" / "report.json").read_text())
    assert (report["state"], report["exit_code"], report["reason"]) == ("ended", 3, str(error))
    assert report["attempts"][0]["cause"] == "refused"


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_without_a_folder_the_spans_are_kept_only_if_no_trace_is_made_of_them(
    tmp_path, monkeypatch, console, is_interrupted
):
    def interrupted(*_):
        raise KeyboardInterrupt

    if is_interrupted:
        monkeypatch.setattr(merging, "merge_files", interrupted)
    plan = plan_with_folder(None, timeline=str(tmp_path / "trace.json"))
    with RunRecord(plan, console) as record:
        folders = [record.begin(plan, count).spans.folder for count in (0, 1)]
        for folder in folders:
            (folder / "instance-0.ended").write_text("1")
        record.finish(0, "")
    assert not any(folder.parent.exists() for folder in folders)
    kept = [each.with_name(f"{each.name}-kept") for each in {folder.parent for folder in folders}]
    assert [each.exists() for each in kept] == [is_interrupted]
    if is_interrupted:
        names = " ".join(str(kept[0] / folder.name) for folder in folders)
        assert f"recorded spans, run python -m popdist_py.timeline {names}" in console.of("warn")[0]
        assert (kept[0] / folders[1].name / "instance-0.ended").exists()
        shutil.rmtree(kept[0])


def test_ctrl_c_while_the_end_is_written_keeps_the_path_of_the_written_timeline(
    tmp_path, monkeypatch, console
):
    plan = plan_with_folder(tmp_path, ENVIRON, timeline="auto")

    interrupts = [KeyboardInterrupt()]
    record = RunRecord(plan, console)
    attempt = record.begin(plan, 0)
    (attempt.spans.folder / "instance-0.ended").write_text("1")

    def end_recorders():
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(record, "_end_recorders", end_recorders)
    with pytest.raises(KeyboardInterrupt), record:
        record.finish(0, "")
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert (report["exit_code"], report["timeline"]) == (130, "timeline.json.gz")


def test_a_saved_plan_and_its_warnings_are_shown_before_it_waits_for_cores(monkeypatch, console):
    def busy(*_):
        assert (shown, console.of("warn")) == ([plan], ["the plan is odd"])
        raise StartError("other jobs hold the cores")

    plan, shown = plan_with_folder(None, ENVIRON), []
    monkeypatch.setattr(launch_module, "plan_warnings", lambda *_, **__: ["the plan is odd"])
    monkeypatch.setattr(launch_planning, "lease_as_planned", busy)
    with pytest.raises(StartError, match="other jobs"):
        launch(Request(plan), console, on_plan=shown.append)
