"""Folders of killed programs are removed by the next start; those of living ones are not."""

from __future__ import annotations

import os
from pathlib import Path

import poprun_py
from poprun_py.jobs import left_folders

FILES = Path("/proc/self/fd")


def test_old_folders_that_nobody_holds_are_swept(tmp_path):
    left, held, young = (tmp_path / f"{left_folders.PREFIX}{name}" for name in "abc")
    for folder in (left, held, young):
        folder.mkdir()
        (folder / "shown").touch()
    (tmp_path / f"{left_folders.PREFIX}link").symlink_to(tmp_path)
    for folder in (left, held):
        os.utime(folder, (0, 0))
    descriptor = left_folders.hold(held)
    left_folders.sweep(tmp_path)
    assert (left.exists(), held.exists(), young.exists()) == (False, True, True)
    os.close(descriptor)
    left_folders.sweep(tmp_path)
    assert not held.exists()


def test_the_folder_of_a_job_is_held_until_its_handle_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(list(FILES.iterdir()))
    with poprun_py.start(["true"], share_cores=True) as job:
        job.wait(60)
        [folder] = tmp_path.iterdir()
        os.utime(folder, (0, 0))
        left_folders.sweep(tmp_path)
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []
    assert len(list(FILES.iterdir())) <= before
