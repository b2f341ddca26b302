"""Jobs with --memory-checkpoints whose mpirun ends: wrappers and programs go on without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.processes import wait_until

from poprun_py import process_info

pytestmark = pytest.mark.mpi

# The programs of an attempt run until the file "go-ATTEMPT" exists. The launcher prepares torch for
# a script with an import statement of the library, which is slow.
PROGRAM = """
import importlib, os, sys, time
from pathlib import Path

heartbeat = importlib.import_module("popdist_py.heartbeat")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
folder = Path(os.environ["NOTES"])
states = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"])
states.mkdir(mode=0o700, exist_ok=True)
(folder / "states").write_text(str(states))
if len(sys.argv) > 1:
    from mpi4py import MPI
heartbeat.step()
(folder / f"{attempt}-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
while not (folder / f"go-{attempt}").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def job(poprun, script, tmp_path):
    """Start a job; give its launcher, and a function that returns a program's two processes."""
    program = script(PROGRAM)

    def start(*arguments):
        return poprun(
            *("--num-instances", 2, "--share-cores", "yes", "--memory-checkpoints"),
            *("--max-restarts", 1, "--grace", 1, program, *arguments),
            env={"NOTES": str(tmp_path)}, start=True,
        )  # fmt: skip

    return start


def processes(folder, attempt):
    """Return the process ids of each program of an attempt and of its wrapper."""
    notes = [folder / f"{attempt}-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in notes), 60)
    return [[int(word) for word in path.read_text().split()] for path in notes]


def kill_mpirun(launcher):
    (mpirun,) = [
        pid for pid in process_info.children_by_parent()[launcher.pid]
        if process_info.command_line(pid).split()[0].endswith(("mpirun", "prterun"))
    ]  # fmt: skip
    os.kill(mpirun, signal.SIGKILL)
    wait_until(lambda: process_info.start_ticks(mpirun) is None, 10)


def folders(launcher, folder):
    """Return the folders of a job that are left."""
    states = Path((folder / "states").read_text())
    of_launcher = [*Path("/dev/shm").glob(f"poprun-{launcher.pid}-*")]
    return of_launcher + [states] * states.exists()


def test_a_job_goes_on_and_restarts_without_mpirun(job, poprun, tmp_path):
    launcher = job()
    (_, wrapper), (program, _) = processes(tmp_path, 0)
    kill_mpirun(launcher)
    os.kill(program, signal.SIGKILL)
    assert processes(tmp_path, 1)[0][1] == wrapper
    (tmp_path / "go-1").touch()
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, stderr
    assert "restarting the job at once (restart 1 of 1)" in stderr
    assert not poprun.survivors()
    assert not folders(launcher, tmp_path)


def test_the_end_of_mpirun_alone_is_no_failure(job, poprun, tmp_path):
    launcher = job()
    processes(tmp_path, 0)
    kill_mpirun(launcher)
    (tmp_path / "go-0").touch()
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, stderr
    assert "restart" not in stderr
    assert not poprun.survivors()
    assert not folders(launcher, tmp_path)


def test_programs_that_have_started_mpi_start_again_with_another_mpirun(job, poprun, tmp_path):
    launcher = job("mpi")
    (_, wrapper), _ = processes(tmp_path, 0)
    kill_mpirun(launcher)
    assert processes(tmp_path, 1)[0][1] != wrapper
    (tmp_path / "go-1").touch()
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, stderr
    assert "mpirun ended with signal SIGKILL" in stderr
    assert not poprun.survivors()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_if_the_launcher_ends_after_mpirun(job, poprun, tmp_path, number):
    launcher = job()
    processes(tmp_path, 0)
    kill_mpirun(launcher)
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=30)
    assert launcher.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not poprun.survivors() and not folders(launcher, tmp_path), 10)
