"""Removal of old runs: what is kept, links, other removers and the link ``latest``."""

from __future__ import annotations

import os
import time

from support.launcher.listed_runs import locked, write_run

from poprun_py.past_runs.listing import run_removal
from poprun_py.past_runs.listing.run_removal import (
    KeptRunError,
    Removal,
    disk_bytes,
    old_runs,
    remove_runs,
)
from poprun_py.past_runs.listing.run_state import RunState
from poprun_py.past_runs.listing.run_summary import read_summaries

OLD = 1000.0
BEFORE = 500.0


def old_ones(parent, **options):
    return old_runs(read_summaries(parent), before=time.time() - BEFORE, **options)


def names(parent):
    return sorted(path.name for path in parent.iterdir())


def age(folder):
    for path in (folder / "report.json", folder):
        os.utime(path, (time.time() - OLD,) * 2)


def test_only_old_runs_that_ended_may_be_removed(tmp_path):
    write_run(tmp_path, "old", ended=OLD)
    write_run(tmp_path, "failed", ended=OLD, code=1, cause="failed")
    write_run(tmp_path, "new", ended=1)
    age(write_run(tmp_path, "lost"))
    age(write_run(tmp_path, "elsewhere", launcher={"host": "elsewhere", "pid": 1}))
    running = write_run(tmp_path, "running")
    age(running)
    held = locked(running)
    damaged = write_run(tmp_path, "damaged")
    (damaged / "report.json").write_text("{")
    age(damaged)
    assert {run.name for run in old_ones(tmp_path)} == {"old", "failed", "lost"}
    asked = {run.name for run in old_ones(tmp_path, states=frozenset({RunState.UNKNOWN}))}
    assert asked == {"old", "failed", "lost", "elsewhere"}
    os.close(held)


def test_removal_follows_no_link_and_repairs_latest(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    parent = tmp_path / "out"
    for name in ("a", "b"):
        folder = write_run(parent, name, ended=OLD)
        (folder / "link").symlink_to(outside)
        (folder / "attempt-1" / "link").symlink_to(outside)
        (folder / "report.html").touch()
    write_run(parent, "new", ended=1)
    (parent / "linked").symlink_to(write_run(outside, "linked", ended=OLD))
    (parent / "latest").symlink_to("b")
    result = remove_runs(parent, old_ones(parent))
    assert ({run.name for run in result.removed}, result.troubles) == ({"a", "b"}, ())
    assert names(parent) == ["latest", "linked", "new"]
    assert str((parent / "latest").readlink()) == "new"
    assert names(outside) == ["kept", "linked"]


def test_the_link_goes_with_the_last_run(tmp_path):
    write_run(tmp_path, "a", ended=OLD)
    (tmp_path / "latest").symlink_to("a")
    remove_runs(tmp_path, old_ones(tmp_path))
    assert names(tmp_path) == []


def test_a_run_that_goes_on_meanwhile_is_kept(tmp_path):
    folders = [write_run(tmp_path, name, ended=OLD) for name in ("changed", "locked", "gone")]
    found = old_ones(tmp_path)
    (folders[0] / "report.json").write_text((folders[0] / "report.json").read_text())
    held = locked(folders[1])
    # A second remover was quicker.
    remove_runs(tmp_path, [run for run in found if run.name == "gone"])
    result = remove_runs(tmp_path, found)
    assert result.removed == ()
    assert sorted(result.troubles) == [
        "changed is kept: the run was continued or changed in the meantime",
        "locked is kept: another process uses or removes the run",
    ]
    assert names(tmp_path) == ["changed", "locked"]
    os.close(held)


def test_a_run_that_another_process_removes_meanwhile_is_no_trouble(tmp_path, monkeypatch):
    folder = write_run(tmp_path, "a", ended=OLD)
    (run,) = old_ones(tmp_path)

    def lose_the_race(*_):
        folder.rename(tmp_path.parent / "removed")
        raise KeptRunError("another process uses or removes the run")

    monkeypatch.setattr(run_removal, "_lock", lose_the_race)
    assert remove_runs(tmp_path, [run]) == Removal(())


def test_a_file_that_cannot_be_removed_leaves_a_run_that_can_be_removed_later(
    tmp_path, monkeypatch
):
    write_run(tmp_path, "a", ended=OLD)
    with monkeypatch.context() as patch:

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        patch.setattr("shutil.rmtree", refuse)
        result = remove_runs(tmp_path, old_ones(tmp_path))
    assert result.troubles == ("a is kept: Permission denied",)
    assert [run.name for run in remove_runs(tmp_path, old_ones(tmp_path)).removed] == ["a"]


def test_disk_space_counts_no_links(tmp_path):
    folder = write_run(tmp_path, "a", ended=1)
    before = disk_bytes(folder)
    assert before >= 5000
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (folder / "link").symlink_to(tmp_path / "large")
    assert disk_bytes(folder) <= before + 8192
