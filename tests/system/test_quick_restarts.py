"""Jobs with --memory-checkpoints: their states survive restarts, and go when the job ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = pytest.mark.mpi

OPTIONS = ("--num-instances", "2", "--share-cores", "yes", "--memory-checkpoints")
# Instance 1 of the first attempt is killed; the last attempt waits for the file "go".
PROGRAM = """
import os, signal, time
from pathlib import Path
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
states = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
before = sorted(path.name for path in states.glob("*"))
states.mkdir(mode=0o700, exist_ok=True)
(states / f"{attempt}-{rank}").touch()
folder = Path(os.environ["NOTES"])
while len(list(states.glob(f"{attempt}-*"))) < 2:
    time.sleep(0.01)
(folder / f"{attempt}-{rank}").write_text(f"{states} {before} {os.getppid()}")
if attempt == "0":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
while not (folder / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def start(poprun, script, tmp_path):
    """Start a job that waits in its second attempt; give its launcher, its folder and its notes."""
    notes = tmp_path / "notes"
    notes.mkdir()
    program = script(PROGRAM)

    def run(*options):
        env = {"NOTES": str(notes)}
        job = poprun(*OPTIONS, *options, program, env=env, start=True)
        wait_until(lambda: (notes / "1-0").exists() or job.poll() is not None, 60)
        assert job.poll() is None, job.communicate()
        return job, Path((notes / "1-0").read_text().split()[0]), notes

    return run


def test_states_survive_a_restart_and_are_removed_at_the_end(start):
    job, states, notes = start("--max-restarts", "1")
    assert "['0-0', '0-1']" in (notes / "1-1").read_text()
    assert sorted(path.name for path in states.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    (notes / "go").touch()
    job.communicate(timeout=30)
    assert job.returncode == 0
    assert not states.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_states_are_removed_when_the_launcher_is_killed_or_stopped(start, number):
    job, states, _ = start("--max-restarts", "1")
    os.kill(job.pid, number)
    job.communicate(timeout=30)
    wait_until(lambda: not states.exists(), 10)
