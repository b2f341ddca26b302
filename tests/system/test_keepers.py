"""Jobs with --memory-checkpoints whose wrappers are killed: their keepers become the wrappers."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.processes import wait_until

from poprun_py.instance.starter import NUM_KEEPERS

pytestmark = pytest.mark.mpi

# A program describes itself in the file ATTEMPT-RANK, and waits for the file "go". The launcher
# prepares torch for a script with an import statement of the library, which is slow.
PROGRAM = """
import sys
is_forked = "fractions" in sys.modules
import importlib, json, os, subprocess, time
import fractions
from pathlib import Path

heartbeat = importlib.import_module("popdist_py.heartbeat")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
folder, states = Path(os.environ["NOTES"]), Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
before = sorted(path.name for path in states.glob("*"))
states.mkdir(mode=0o700, exist_ok=True)
(states / f"{attempt}-{rank}").touch()
child = subprocess.Popen(["sleep", "600"])
note = {
    "pid": os.getpid(), "wrapper": os.getppid(), "child": child.pid, "is_forked": is_forked,
    "states": str(states), "before": before, "descriptors": len(os.listdir("/proc/self/fd")),
}
heartbeat.step()
(folder / "new").mkdir(exist_ok=True)
(folder / "new" / rank).write_text(json.dumps(note))
(folder / "new" / rank).rename(folder / f"{attempt}-{rank}")
while not (folder / "go").exists():
    time.sleep(0.01)
child.kill()
child.wait()
"""


@pytest.fixture
def start(poprun, script, tmp_path):
    """Start a job; give its launcher, and a function that returns the note of a program."""
    program = script(PROGRAM)

    def note(attempt, rank):
        path = tmp_path / f"{attempt}-{rank}"
        wait_until(path.exists, 60)
        return json.loads(path.read_text())

    def run(*options):
        job = poprun(
            *("--num-instances", 2, "--share-cores", "yes", "--memory-checkpoints", *options),
            program, env={"NOTES": str(tmp_path)}, start=True,
        )  # fmt: skip
        return job, note

    return run


def spare_of(note, timeout=30):
    """Wait until the wrapper of a program has a spare, which has the program's command."""
    command = Path(f"/proc/{note['pid']}/cmdline").read_bytes()

    def found():
        children = Path(f"/proc/{note['wrapper']}/task/{note['wrapper']}/children").read_text()
        return [
            int(pid) for pid in children.split()
            if int(pid) != note["pid"] and Path(f"/proc/{pid}/cmdline").read_bytes() == command
        ]  # fmt: skip

    wait_until(found, timeout)
    return found()[0]


def kill_wrapper(note):
    """Kill a wrapper; return its parent."""
    stat = Path(f"/proc/{note['wrapper']}/stat").read_text()
    os.kill(note["wrapper"], signal.SIGKILL)
    return int(stat.rpartition(")")[2].split()[1])


def test_keepers_replace_killed_wrappers_one_after_another(start, poprun, tmp_path):
    last = NUM_KEEPERS + 1
    job, note = start("--max-restarts", last)
    spare = spare_of(note(0, 1))
    for attempt in range(NUM_KEEPERS):
        before, other = note(attempt, 1), note(attempt, 0)
        time.sleep(0.2)  # the keeper learns of the spare
        keeper = kill_wrapper(before)
        after = note(attempt + 1, 1)
        assert after["wrapper"] == keeper
        assert note(attempt + 1, 0)["wrapper"] == other["wrapper"]
        assert after["is_forked"]
        assert {f"{each}-{rank}" for each in range(attempt + 1) for rank in "01"} <= {
            *after["before"]
        }
        assert after["descriptors"] == before["descriptors"]
        assert not Path(f"/proc/{before['child']}").exists()
        assert spare_of(after) == spare
    kill_wrapper(note(NUM_KEEPERS, 1))  # no keeper is left, so mpirun starts another wrapper
    assert note(last, 1)["before"][:2] == ["0-0", "0-1"]
    (tmp_path / "go").touch()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    assert stderr.count("at once") == last
    assert not poprun.survivors()
    assert not Path(note(0, 0)["states"]).exists()


@pytest.mark.parametrize("how", ["all wrappers", "without a restart", "launcher", "keeper"])
def test_nothing_is_left_after_kills_of_wrappers(start, poprun, tmp_path, how):
    job, note = start("--max-restarts", 0 if how == "without a restart" else 2)
    notes = [note(0, rank) for rank in (0, 1)]
    code = 0
    if how == "keeper":
        stat = Path(f"/proc/{notes[0]['wrapper']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(0.5)
        assert all(Path(f"/proc/{each['pid']}").exists() for each in notes)
    elif how == "launcher":
        job.kill()
        kill_wrapper(notes[0])
        code = -9
    else:
        for each in notes if how == "all wrappers" else notes[:1]:
            kill_wrapper(each)
        code = 137 if how == "without a restart" else 0
    if how == "all wrappers":
        note(1, 0), note(1, 1)
    (tmp_path / "go").touch()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == code, stderr
    wait_until(lambda: not poprun.survivors() and not Path(notes[0]["states"]).exists(), 15)
