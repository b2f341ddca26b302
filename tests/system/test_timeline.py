"""The timeline of real jobs: what every instance did when, also of one that was killed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until
from support.repository import ROOT
from support.trace_tables import events, query

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).with_name("timeline_program.py")
TWO = ("--num-instances", "2", "--num-replicas", "2")
# Spans with their row and their process.
_SPANS = (
    "(SELECT slice.*, thread.name AS row, process.name AS process FROM slice"
    " JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid)"
    " JOIN process USING (upid))"
)


@pytest.mark.sweep
def test_calls_of_some_instances_are_counted_apart(poprun, script, tmp_path):
    """Else the first call of all would be the third of instance 0."""
    path = script(
        "import numpy as np, popdist_py\n"
        "popdist_py.init()\n"
        "def call(): popdist_py.all_reduce(np.ones(2))\n"
        "for _ in range(2): popdist_py.execute_on_instances({0, 2}, call)\n"
        "call()\n"
        "popdist_py.all_reduce(np.ones(2), async_op=True).wait()\n"
    )
    done = poprun("-n", 3, "--oversubscribe", "--timeline=t.json", path)
    assert done.returncode == 0, done.stderr
    arrows = query(
        tmp_path / "t.json",
        f"SELECT a.name, a.process, b.process FROM flow JOIN {_SPANS} a ON slice_out = a.id"
        f" JOIN {_SPANS} b ON slice_in = b.id WHERE a.name = b.name",
    )
    calls = [(name, *sorted([one, other])) for name, one, other in arrows]
    assert calls.count(("reduce all_reduce of 0,2", "instance 0", "instance 2")) == 2
    names = [name for name, _, _ in calls]
    assert names.count("reduce all_reduce") == 2
    assert names.count("reduce beside the program") == 2


@pytest.mark.sweep
def test_a_killed_job_has_a_timeline_and_leaves_nothing_else(poprun, tmp_path):
    done = poprun(*TWO, "--timeline=killed.json", sys.executable, PROGRAM, "kill")
    assert done.returncode == 137
    counts = dict(
        query(
            tmp_path / "killed.json",
            f"SELECT process, COUNT(*) FROM {_SPANS} WHERE name = 'step' GROUP BY process",
        )
    )
    assert counts["instance 1"] == "6"
    # What went on when it ended: instance 0 waits, until the job is ended, for the one that died.
    found = {
        (event["pid"], event["name"]): event["dur"]
        for event in events(tmp_path / "killed.json")
        if event.get("args", {}).get("unfinished")
    }
    assert found[1, "reduce gradients"] >= found[1, "wait for instances"] > 0
    assert (1, "step") in found
    assert (2, "step") not in found
    assert [path.name for path in tmp_path.glob("*.json*")] == ["killed.json"]


@pytest.mark.sweep
def test_restarts_are_in_one_timeline(poprun, tmp_path):
    code = (
        "import os, popdist_py\nwith popdist_py.span('work'): popdist_py.init()\n"
        "assert os.environ['POPDIST_RESTART_COUNT'] == '1'"
    )
    done = poprun(*TWO, "--max-restarts=1", "--timeline", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    named = query(tmp_path / "timeline.json.gz", "SELECT name FROM process ORDER BY pid")
    assert [name for (name,) in named] == [
        f"instance {i} (attempt {n})" for n in (1, 2) for i in (0, 1)
    ]


@pytest.mark.sweep
def test_what_a_killed_launcher_left_can_be_merged(poprun, script, tmp_path):
    path = script(
        "import pathlib, time, popdist_py\n"
        "with popdist_py.span('before the end'): pass\n"
        "pathlib.Path('there').touch()\n"
        "time.sleep(60)\n"
    )
    job = poprun("--output-dir=out", "--timeline", sys.executable, path, start=True)
    wait_until((tmp_path / "there").exists, 60, "the program does not start")
    job.kill()
    job.wait()
    wait_until(lambda: not poprun.survivors(), 30, "the program goes on")
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py.timeline", "out/latest/attempt-1/spans", "-o", "t.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "t.json: 1 span\n"
    assert query(tmp_path / "t.json", "SELECT name FROM slice") == [("before the end",)]


@pytest.mark.parametrize("path", ["nowhere/file.json", "."])
def test_what_cannot_be_written_is_refused_before_anything_starts(look, tmp_path, path):
    done = look(f"--timeline={path}", "touch", "ran")
    assert done.returncode == 2
    assert done.stderr == (
        f"poprun-py: error: --timeline {path}: expected the path of a file in an existing folder "
        "with write permission\n"
    )
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_written_at_the_end_is_kept(poprun, script, tmp_path):
    """The disk may be full by then; here the folder is gone."""
    (tmp_path / "there").mkdir()
    code = "import os, popdist_py\nwith popdist_py.span('a'): os.rmdir('there')\n"
    done = poprun("--timeline=there/t.json", sys.executable, script(code))
    assert done.returncode == 0
    told = r"cannot be written .*; to make the timeline from the recorded spans, run python (-m .*)"
    (command,) = re.findall(told, done.stderr)
    merge = [sys.executable, *shlex.split(command), "-o", "t.json"]
    subprocess.run(merge, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert query(tmp_path / "t.json", "SELECT name FROM slice") == [("a",)]
    shutil.rmtree(shlex.split(command)[-1])


def test_a_program_that_records_nothing_has_an_empty_timeline(poprun, tmp_path):
    done = poprun("--timeline", "true")
    assert done.returncode == 0
    assert "poprun-py: warning: timeline: timeline.json.gz: 0 spans, because" in done.stderr
    assert query(tmp_path / "timeline.json.gz", "SELECT COUNT(*) FROM slice") == [("0",)]
