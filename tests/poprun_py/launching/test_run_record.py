"""The folder and report of a run, also when files cannot be written."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.plans import plan_blindly, plan_with_folder

from poprun_py.errors import UsageError
from poprun_py.launching import run_folder
from poprun_py.launching.run_folder import RunFolder
from poprun_py.launching.run_record import AttemptRecord, RunRecord
from poprun_py.machines.host_list import parse_host_list
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.plan_file import plan_from_json
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult


def opened(plan):
    """Return the folder of a run."""
    return RunFolder(plan, plan.environ.get("POPRUN_RUN_ID", "run"))


@pytest.fixture
def full_disk(monkeypatch):
    def refuse(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "_make_attempt", refuse)


def test_without_a_folder_nothing_is_kept():
    console = KeptConsole()
    with RunRecord(plan_with_folder(None, {"POPRUN_RUN_ID": "mine"}), console) as record:
        assert record.begin(plan_with_folder(None), 0) == AttemptRecord("mine")
        record.end(LaunchResult(exit_code=0))
        record.finish(0, "")
    assert console.said == [("log", "the name of the run is mine")]


def test_a_first_attempt_that_cannot_be_kept_is_refused(tmp_path, full_disk):
    record = opened(plan_with_folder(tmp_path))
    with pytest.raises(UsageError, match=r"^output_dir .*No space left on device"):
        record.begin_attempt(plan_with_folder(tmp_path), 0)
    record.close()


def test_a_later_attempt_goes_on_without_its_files(tmp_path, full_disk):
    record = opened(plan_with_folder(tmp_path))
    assert record.begin_attempt(plan_with_folder(tmp_path), 1) is None
    assert "No space left on device" in record.trouble
    record.close()


def test_the_report_is_whole_although_the_folder_was_removed(tmp_path):
    plan = plan_with_folder(tmp_path, {"POPRUN_RUN_ID": "mine"})
    record = opened(plan)
    record.begin_attempt(plan, 0)
    record.end_attempt(LaunchResult(exit_code=7, reason="failed"))
    shutil.rmtree(tmp_path / "mine")
    record.begin_attempt(plan, 1)
    record.end_attempt(LaunchResult(exit_code=0))
    record.finish(0, "")
    record.close()
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert [a["exit_code"] for a in report["attempts"]] == [7, 0]
    assert (report["state"], report["exit_code"], record.trouble) == ("ended", 0, "")


@pytest.mark.parametrize("folder", ["mine", "elsewhere"])
def test_the_report_names_the_trace(tmp_path, folder):
    """From its own folder, which may be moved; else with the whole path."""
    record = opened(plan_with_folder(tmp_path, {"POPRUN_RUN_ID": "mine"}))
    record.begin_attempt(plan_with_folder(tmp_path), 0)
    report = tmp_path / "mine" / "report.json"
    assert json.loads(report.read_text())["timeline"] is None
    record.finish(0, "", tmp_path / folder / "t.json")
    record.close()
    shown = "t.json" if folder == "mine" else str(tmp_path / folder / "t.json")
    assert json.loads(report.read_text())["timeline"] == shown


def test_a_run_that_was_refused_can_be_launched_again(tmp_path):
    plan = plan_with_folder(tmp_path, {"POPRUN_RUN_ID": "mine"})
    (tmp_path / "mine").mkdir()
    for text in ("{}", "{}", '{"attempts": {}}', '{"attempts": [1]}', "[]", "no"):
        (tmp_path / "mine" / "report.json").write_text(text)
        with pytest.raises(UsageError, match="is not the report of a run"):
            opened(plan)
    (tmp_path / "mine" / "report.json").unlink()
    opened(plan).close()


def test_an_attempt_whose_launcher_was_killed_is_told_by_the_next_launch(tmp_path):
    environ = {"POPRUN_RUN_ID": "mine"}
    killed = opened(plan_with_folder(tmp_path, environ))
    killed.begin_attempt(plan_with_folder(tmp_path, environ), 0)
    killed.close()  # as the kernel does
    record = opened(plan_with_folder(tmp_path, environ))
    record.begin_attempt(plan_with_folder(tmp_path, environ), 0)
    record.end_attempt(LaunchResult(exit_code=0))
    record.close()
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert [attempt["cause"] for attempt in report["attempts"]] == ["launcher_lost", "completed"]


def test_the_plan_of_each_attempt_is_kept_without_values_of_env(tmp_path):
    config = LaunchConfig(program=("x", "y"), output_dir=str(tmp_path), env=("MINE=hush",))
    plan = plan_blindly(config)
    record = opened(plan)
    folders = [Path(record.begin_attempt(plan, count)) for count in (0, 1)]
    record.close()
    for folder in folders:
        path = folder / "plan.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "hush" not in path.read_text()
        data = json.loads(path.read_text())
        with pytest.raises(UsageError, match="set MINE in the environment of this launch"):
            plan_from_json(data, {}).require_fit()
        again = plan_from_json(data, {"MINE": "hush"})
        assert again.instances == plan.instances
        assert again.config.program == ("x", "y")


def test_a_plan_that_cannot_be_written_keeps_nothing_from_running(tmp_path, monkeypatch):
    def refuse(path, text):
        if path.name == "plan.json":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_whole", refuse)
    record = opened(plan_with_folder(tmp_path))
    folder = record.begin_attempt(plan_with_folder(tmp_path), 0)
    record.close()
    assert record.trouble == (
        f"the plan of the attempt cannot be written to {folder}: No space left on device"
    )


def test_on_a_full_disk_the_report_still_tells_the_end(tmp_path, monkeypatch):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    plan = plan_with_folder(tmp_path)
    record = opened(plan)
    record.begin_attempt(plan, 0)
    monkeypatch.setattr(run_folder, "write_whole", refuse)
    instances = (InstanceResult(index=0, code=9, stderr_tail="x" * 100_000),)
    result = LaunchResult(
        exit_code=9, reason="instance 1 ended with exit code 9. " * 1000, instances=instances
    )
    record.end_attempt(result)
    record.finish(result.exit_code, result.explanation)
    record.close()
    assert record.trouble.endswith(
        "report.json contains only a short report: No space left on device"
    )
    files = tmp_path / "latest" / "report.json"
    report = json.loads(files.read_text())
    assert (report["state"], report["exit_code"]) == ("ended", 9)
    assert report["reason"].startswith("instance 1 ended with exit code 9. instance")
    assert report["attempts"][0]["exit_code"] == 9
    read_run(RunFiles(files.parent))


def test_a_report_that_is_not_there_is_not_named(tmp_path):
    plan = plan_with_folder(tmp_path, {"POPRUN_RUN_ID": "mine"})
    with RunRecord(plan, KeptConsole()) as record:
        record.begin(plan, 0)
        shutil.rmtree(tmp_path / "mine")
    assert record.report is None


def test_an_attempt_that_runs_and_one_that_never_started(tmp_path):
    config = LaunchConfig(num_instances=2, program=("x",), output_dir=str(tmp_path))
    plan = plan_blindly(config, hosts=parse_host_list("a,b", source="test"))
    record = opened(plan)
    record.begin_attempt(plan, 1)
    file = tmp_path / "run" / "report.json"
    runs = json.loads(file.read_text())["attempts"][0]
    assert (runs["number"], runs["folder"], runs["restart_count"]) == (1, "attempt-1", 1)
    assert (runs["hosts"], runs["exit_code"], runs["cause"]) == (["a", "b"], None, None)
    record.finish(3, "no mpirun", cause="refused")
    record.close()
    refused = json.loads(file.read_text())["attempts"][0]
    assert (refused["exit_code"], refused["cause"], refused["reason"]) == (
        3, "refused", "no mpirun"
    )  # fmt: skip
    assert refused["ended_at"] >= runs["began_at"]
    assert refused["instances"] == []
