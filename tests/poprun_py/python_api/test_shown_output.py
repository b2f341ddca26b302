"""The file with the shown output of a job in the background takes little disk space."""

from __future__ import annotations

import functools
import os

import pytest
from support.processes import wait_until

import poprun_py
from poprun_py.python_api import launcher_child
from poprun_py.python_api.handle import SHOWN
from poprun_py.python_api.shown_output import ShownOutput

KEPT = 1 << 16


def disk_bytes(path):
    return path.stat().st_blocks * 512


def test_the_old_part_of_a_file_takes_no_disk_space(tmp_path):
    path = tmp_path / "shown"
    shown = ShownOutput(path, KEPT)
    shown.free_old_part()  # the file does not exist yet
    path.write_bytes(os.urandom(2 * KEPT - 1))
    before = path.read_bytes()
    shown.free_old_part()
    assert path.read_bytes() == before
    for _ in range(3):
        with path.open("ab") as file:
            file.write(os.urandom(10 * KEPT))
        before = path.read_bytes()
        shown.free_old_part()
        after = path.read_bytes()
        assert (len(after), after[-KEPT:]) == (len(before), before[-KEPT:])
        assert not after[:-KEPT].strip(b"\0")
        assert disk_bytes(path) <= 2 * KEPT


@pytest.mark.mpi
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_job_that_writes_much_takes_little_disk_space(own_leases, monkeypatch, is_shown, capsys):
    monkeypatch.setattr(launcher_child, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(
        launcher_child, "ShownOutput", functools.partial(ShownOutput, kept_bytes=KEPT)
    )
    program = ("sh", "-c", "seq 200000; echo last; exec sleep 100")
    with poprun_py.start(program, share_cores=True, show=is_shown) as job:
        (path,) = job._folder.glob(SHOWN)
        wait_until(lambda: job.output().endswith("last\n"))
        wait_until(lambda: disk_bytes(path) < 4 * KEPT < 32 * KEPT < path.stat().st_size)
        assert job.output().endswith("[1,0]<stdout>:200000\n[1,0]<stdout>:last\n")
