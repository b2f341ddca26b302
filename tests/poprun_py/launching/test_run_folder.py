"""The folders of runs, with their names, attempts, reports, locks and the link ``latest``."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from popdist_py.environment import InstanceEnvironment
from poprun_py.errors import UsageError
from poprun_py.launching.run_folder import RunFolder, run_id


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return path.stat().st_mode & 0o777


def test_generated_names_sort_by_time_on_every_host_and_are_unique(monkeypatch):
    for zone in ("Pacific/Auckland", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        before = time.time()
        name = run_id({})
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", name)
        began = datetime.strptime(name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
        assert int(before) <= began.timestamp() <= time.time()
    monkeypatch.delenv("TZ")
    time.tzset()
    assert len({run_id({}) for _ in range(100)}) == 100


def test_the_user_may_name_a_run():
    assert run_id({"POPRUN_RUN_ID": "slurm-4711_a.b"}) == "slurm-4711_a.b"
    assert run_id({"POPRUN_RUN_ID": ""}).startswith("20")


def test_a_job_inside_an_instance_is_another_run():
    around = {**InstanceEnvironment().to_environ(), "POPRUN_RUN_ID": "outer"}
    assert run_id(around) != "outer"


@pytest.mark.parametrize(
    "name", ["..", ".hidden", "a/b", "a b", "ä", "latest", "x" * 129, "-x", "a\n"]
)
def test_an_invalid_name_is_refused(name):
    with pytest.raises(UsageError, match=r"POPRUN_RUN_ID=.*expected the name of a folder"):
        run_id({"POPRUN_RUN_ID": name})


def test_every_run_has_a_private_folder_and_the_newest_a_link(tmp_path):
    parent = tmp_path / "new" / "out"
    for name in ("b", "a"):
        folder = RunFolder(str(parent), name)
        assert folder.path == parent / name
        folder.link_latest()
        assert str((parent / "latest").readlink()) == name
        number, path = folder.make_attempt()
        folder.save_report("{}")
        assert (number, mode(folder.path), mode(path)) == (1, 0o700, 0o700)
        assert mode(parent / "latest" / "report.json") == 0o600
        folder.close()
        assert folder.trouble == ""
    assert names(parent) == ["a", "b", "latest"]


def test_attempts_are_numbered_across_launches(tmp_path):
    for wanted in (1, 3):
        folder = RunFolder(str(tmp_path), "run")
        assert folder.make_attempt() == (wanted, tmp_path / "run" / f"attempt-{wanted}")
        assert folder.make_attempt()[0] == wanted + 1
        folder.close()
    (tmp_path / "run" / "attempt-11").mkdir()
    (tmp_path / "run" / "attempt-x").mkdir()
    folder = RunFolder(str(tmp_path), "run")
    assert folder.make_attempt()[0] == 12
    folder.close()


def test_a_run_has_one_launcher_at_a_time(tmp_path):
    first = RunFolder(str(tmp_path), "run")
    with pytest.raises(UsageError, match=r"=run: the run of this name .* has not ended"):
        RunFolder(str(tmp_path), "run")
    RunFolder(str(tmp_path), "other").close()
    first.close()
    RunFolder(str(tmp_path), "run").close()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_file_of_the_user_named_latest_stays(tmp_path, make):
    make(tmp_path / "latest")
    folder = RunFolder(str(tmp_path), "run")
    folder.link_latest()
    assert "has no link latest: there is another file of that name" in folder.trouble
    assert not (tmp_path / "latest").is_symlink()
    assert names(tmp_path) == ["latest", "run"]
    folder.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    for parent in ("taken", "taken/out"):
        with pytest.raises(UsageError, match=r"--output-dir .*taken"):
            RunFolder(str(tmp_path / parent), "run")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UsageError, match="files cannot be made in it"):
        RunFolder(str(tmp_path / "out"), "run")


def test_a_report_that_cannot_be_read_is_refused_and_kept(tmp_path):
    folder = RunFolder(str(tmp_path), "run")
    assert folder.earlier_report() is None
    folder.save_report("kept")
    assert folder.earlier_report() == "kept"
    (folder.path / "report.json").unlink()
    (folder.path / "report.json").mkdir()
    with pytest.raises(UsageError, match=r"report\.json is no report of a run \(Is a directory\)"):
        folder.earlier_report()
    folder.close()


def test_a_removed_folder_is_created_again_for_reports_and_attempts(tmp_path):
    folder = RunFolder(str(tmp_path / "out"), "run")
    folder.path.rmdir()
    folder.save_report("{}\n")
    assert (tmp_path / "out" / "run" / "report.json").read_text() == "{}\n"
    assert mode(folder.path) == 0o700
    assert folder.make_attempt()[0] == 1
    assert not folder.trouble
    folder.close()


def test_a_report_that_cannot_be_written_is_a_trouble(tmp_path):
    folder = RunFolder(str(tmp_path), "run")
    (folder.path / "report.json").mkdir()
    folder.save_report("{}")
    assert "has no report: Is a directory" in folder.trouble
    folder.close()
