"""The folders of runs, with their names, attempts, reports, locks and the link ``latest``."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.launcher.plans import plan_blindly, plan_with_folder

from popdist_py.environment import InstanceEnvironment
from poprun_py.errors import UsageError
from poprun_py.launching import run_folder
from poprun_py.launching.run_folder import RunFolder
from poprun_py.launching.run_names import new_run_id
from poprun_py.machines.host_list import parse_host_list
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.past_runs.recorded_run import seconds_since_epoch


def opened(parent, name="run"):
    return RunFolder(plan_with_folder(parent), name)


def begin(folder):
    """Begin an attempt and return its number."""
    path = folder.begin_attempt(plan_with_folder(folder.path.parent), 0)
    return int(path.rpartition("-")[2])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return path.stat().st_mode & 0o777


def test_generated_names_sort_by_time_on_every_host_and_are_unique(monkeypatch):
    for zone in ("Pacific/Auckland", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        before = time.time()
        name = new_run_id({})
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", name)
        began = datetime.strptime(name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        # The kernel's clock of whole seconds may lag a tick behind time.time().
        assert int(before) - 1 <= began.timestamp() <= time.time()
    monkeypatch.delenv("TZ")
    time.tzset()
    assert len({new_run_id({}) for _ in range(100)}) == 100


def test_the_user_may_name_a_run():
    assert new_run_id({"POPRUN_RUN_ID": "slurm-4711_a.b"}) == "slurm-4711_a.b"
    assert new_run_id({"POPRUN_RUN_ID": ""}).startswith("20")


def test_a_job_inside_an_instance_is_another_run():
    around = {**InstanceEnvironment().to_environ(), "POPRUN_RUN_ID": "outer"}
    assert new_run_id(around) != "outer"


@pytest.mark.parametrize(
    "name", ["..", ".hidden", "a/b", "a b", "ä", "latest", "x" * 129, "-x", "a\n"]
)
def test_an_invalid_name_is_refused(name):
    with pytest.raises(UsageError, match=r"POPRUN_RUN_ID=.*expected a folder name"):
        new_run_id({"POPRUN_RUN_ID": name})


def test_every_run_has_a_private_folder_and_the_newest_a_link(tmp_path):
    parent = tmp_path / "new" / "out"
    for name in ("b", "a"):
        folder = opened(parent, name)
        assert folder.path == parent / name
        assert str((parent / "latest").readlink()) == name
        assert begin(folder) == 1
        assert (mode(folder.path), mode(folder.path / "attempt-1")) == (0o700, 0o700)
        assert mode(parent / "latest" / "report.json") == 0o600
        folder.close()
        assert folder.trouble == ""
    assert names(parent) == ["a", "b", "latest"]


def test_attempts_are_numbered_across_launches(tmp_path):
    for wanted in (1, 3):
        folder = opened(tmp_path)
        assert [begin(folder), begin(folder)] == [wanted, wanted + 1]
        assert (tmp_path / "run" / f"attempt-{wanted}").is_dir()
        folder.close()
    (tmp_path / "run" / "attempt-11").mkdir()
    (tmp_path / "run" / "attempt-x").mkdir()
    folder = opened(tmp_path)
    assert begin(folder) == 12
    folder.close()


def test_a_run_has_one_launcher_at_a_time(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(UsageError, match=r"=run: the run of this name .* has not ended"):
        opened(tmp_path)
    opened(tmp_path, "other").close()
    first.close()
    opened(tmp_path).close()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_file_of_the_user_named_latest_stays(tmp_path, make):
    make(tmp_path / "latest")
    folder = opened(tmp_path)
    assert "cannot be updated: a file of this name exists, and is not a link" in folder.trouble
    assert not (tmp_path / "latest").is_symlink()
    assert names(tmp_path) == ["latest", "run"]
    folder.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    for parent in ("taken", "taken/out"):
        with pytest.raises(UsageError, match=r"output_dir .*taken"):
            opened(tmp_path / parent)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UsageError, match="no files can be created in the folder of the run, "):
        opened(tmp_path / "out")


def test_a_file_that_is_not_a_report_is_refused_and_kept(tmp_path):
    (tmp_path / "run" / "report.json").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=r"report.json is not the report of a run \(Is a " r"directory\)"
    ):
        opened(tmp_path)
    assert (tmp_path / "run" / "report.json").is_dir()


def test_a_removed_folder_is_created_again_for_reports_and_attempts(tmp_path):
    folder = opened(tmp_path / "out")
    folder.path.rmdir()
    assert begin(folder) == 1
    assert mode(folder.path) == 0o700
    shutil.rmtree(folder.path)
    folder.finish(3, "failed")
    assert json.loads((folder.path / "report.json").read_text())["exit_code"] == 3
    assert not folder.trouble
    folder.close()


def test_a_report_that_cannot_be_written_is_a_trouble(tmp_path):
    folder = opened(tmp_path)
    (folder.path / "report.json").mkdir()
    begin(folder)
    assert "Is a directory" in folder.trouble
    folder.close()


def test_a_run_begins_after_its_wait_for_cores_and_ipus(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(run_folder.time, "time", lambda: now)
    folder = opened(tmp_path)
    now = 1060.0  # the job waits for IPUs
    folder.note_resources(60.0, shares_cores=False)
    now = 1061.0
    begin(folder)
    folder.close()
    report = json.loads((folder.path / "report.json").read_text())
    assert seconds_since_epoch(report["began_at"]) == 1060.0
    # A later launch continues the run, and does not begin it again.
    now = 2000.0
    again = opened(tmp_path)
    again.note_resources(0.0, shares_cores=False)
    begin(again)
    report = json.loads((folder.path / "report.json").read_text())
    assert seconds_since_epoch(report["began_at"]) == 1060.0
    again.close()


def test_attempts_record_how_the_hosts_change(tmp_path):
    folder = opened(tmp_path)
    config = LaunchConfig(
        program=("true",), output_dir=str(tmp_path), num_instances=2, num_replicas=4
    )
    for count, hosts in enumerate(("a,b", "a,c", "a,c")):
        planned = plan_blindly(config, hosts=parse_host_list(hosts, source="test"))
        folder.begin_attempt(planned, count)
    folder.begin_attempt(plan_blindly(config, environ={"POPDIST_DETERMINISTIC": "1"}), 3)
    attempts = json.loads((folder.path / "report.json").read_text())["attempts"]
    assert attempts[1]["host_change"] == {
        "lost": ["b"],
        "joined": ["c"],
        "num_instances_before": 2,
        "num_instances": 2,
        "is_deterministic": False,
    }
    assert ["host_change" in each for each in attempts] == [False, True, False, True]
    assert attempts[3]["host_change"]["is_deterministic"]


def test_attempts_record_the_queue_and_the_machine_at_their_start(tmp_path):
    folder = opened(tmp_path)
    folder.note_resources(2.5, shares_cores=True)
    begin(folder)
    begin(folder)
    first, second = json.loads((folder.path / "report.json").read_text())["attempts"]
    assert (first["queue_seconds"], first["shares_cores"]) == (2.5, True)
    assert ("queue_seconds" in second, second["shares_cores"]) == (False, True)
    assert first["machine_at_start"].keys() == {"load", "num_cpus"}
    free = opened(tmp_path, "free")
    free.note_resources(0.0, shares_cores=False)
    begin(free)
    (only,) = json.loads((free.path / "report.json").read_text())["attempts"]
    assert not only.keys() & {"queue_seconds", "shares_cores"}
