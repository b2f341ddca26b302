"""Jobs with --memory-checkpoints: wrappers and states survive restarts and go with the job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = pytest.mark.mpi

OPTIONS = ("--num-instances", "2", "--share-cores", "yes", "--memory-checkpoints")
# What differs between the environments of two attempts.
CHANGING = {
    "MASTER_PORT",
    "POPDIST_RESTART_COUNT",
    "POPDIST_RUN_FILES",
    "TORCHELASTIC_RESTART_COUNT",
}
# Instance 1 of the first attempt fails as FAILURE says; the last attempt waits for the file "go".
# The launcher prepares torch for a script with an import statement of the library, which is slow.
PROGRAM = """
import importlib, json, os, signal, sys, time
from pathlib import Path

heartbeat = importlib.import_module("popdist_py.heartbeat")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
states, folder = Path(os.environ["POPDIST_CHECKPOINT_MEMORY"]), Path(os.environ["NOTES"])
before = sorted(path.name for path in states.glob("0-*"))
states.mkdir(mode=0o700, exist_ok=True)
(states / f"{attempt}-{rank}").touch()
wrapper = os.getppid()
note = {
    "states": str(states), "before": before, "wrapper": wrapper, "environ": dict(os.environ),
    "stdin": sys.stdin.read(), "descriptors": len(os.listdir(f"/proc/{wrapper}/fd")),
}
def kill():
    # A keeper would replace the wrapper, so the keepers are killed first.
    pids = [os.getpid()]
    if "wrapper" in failure:
        pids = [wrapper]
        while os.getsid(parent := parent_of(pids[0])) == os.getsid(wrapper):
            pids.insert(0, parent)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
failure = os.environ["FAILURE"]
if failure == "mpi":
    from mpi4py import MPI
if failure != "start":
    heartbeat.step()
while len(list(states.glob(f"{attempt}-*"))) < 2:
    time.sleep(0.01)
temporary = folder / f"{attempt}-{rank}.new"
temporary.write_text(json.dumps(note))
temporary.rename(folder / f"{attempt}-{rank}")
while len(list(folder.glob(f"{attempt}-?"))) < 2:
    time.sleep(0.01)
if attempt == "0" or failure == "again" and attempt == "1":
    if rank == "1":
        kill()
    time.sleep(60)
if attempt == "1" and failure == "wrapper, then mpi":
    from mpi4py import MPI
    time.sleep(60)
while not (folder / "go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def start(poprun, script, tmp_path):
    """Start a job that waits in its last attempt; give its launcher and the notes of a program.

    The function that reads notes takes the number of an attempt and an instance.
    """
    folder = tmp_path / "notes"
    folder.mkdir()
    program = script(PROGRAM)
    (tmp_path / "input").write_text("typed")

    def note(attempt, rank):
        path = folder / f"{attempt}-{rank}"
        wait_until(lambda: path.exists() or job.poll() is not None, 60)
        assert path.exists(), job.communicate()
        return json.loads(path.read_text())

    def run(failure="program", restarts=1, *options):
        nonlocal job
        with (tmp_path / "input").open() as given:
            job = poprun(
                *OPTIONS, "--max-restarts", restarts, *options, program,
                env={"NOTES": str(folder), "FAILURE": failure}, start=True, stdin=given,
            )  # fmt: skip
        note(restarts, 0), note(restarts, 1)
        return job, note

    job = None
    yield run
    (folder / "go").touch()


def end(job, tmp_path):
    (tmp_path / "notes/go").touch()
    _, stderr = job.communicate(timeout=30)
    assert job.returncode == 0, stderr
    return stderr


def test_every_attempt_has_the_same_wrappers_states_and_environment(start, tmp_path):
    job, note = start("again", 2, "--output-dir", tmp_path / "runs", "--run-name", "r")
    for rank in (0, 1):
        first, *later = (note(attempt, rank) for attempt in range(3))
        for each in later:
            assert each["wrapper"] == first["wrapper"]
            assert each["before"] == ["0-0", "0-1"]
            assert each["stdin"] == first["stdin"] == ("typed" if rank == 0 else "")
            names = first["environ"].keys() | each["environ"].keys()
            changed = {n for n in names if first["environ"].get(n) != each["environ"].get(n)}
            assert changed == CHANGING
        descriptors = Path(f"/proc/{first['wrapper']}/fd")
        most = first["descriptors"] + 1  # the lock on the states
        wait_until(lambda of=descriptors, most=most: len(list(of.iterdir())) <= most)
    states = Path(note(2, 0)["states"])
    assert states.is_dir()
    stderr = end(job, tmp_path)
    assert "restarting the job at once (restart 1 of 2)" in stderr
    assert "restarting the job at once (restart 2 of 2)" in stderr
    assert "the last restart took " in stderr
    assert not states.exists()
    report = json.loads((tmp_path / "runs/r/report.json").read_text())
    assert [attempt["exit_code"] for attempt in report["attempts"]] == [137, 137, 0]
    for attempt in report["attempts"][1:]:
        assert attempt["restart"]["num_repeated_steps"] == 1  # no state was loaded


def test_only_a_lost_wrapper_is_replaced(start, tmp_path):
    job, note = start("wrapper")
    assert note(1, 0)["wrapper"] == note(0, 0)["wrapper"]
    assert note(1, 1)["wrapper"] != note(0, 1)["wrapper"]
    ranks = ("RANK", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
    assert [note(1, 1)["environ"][name] for name in ranks] == ["1", "1", "2", "2"]
    assert "restarting the job at once (restart 1 of 1)" in end(job, tmp_path)
    assert not Path(note(1, 0)["states"]).exists()


def test_all_wrappers_are_replaced_if_programs_start_mpi_later(start, tmp_path):
    job, note = start("wrapper, then mpi", 2)
    assert all(note(2, rank)["wrapper"] != note(1, rank)["wrapper"] for rank in (0, 1))
    end(job, tmp_path)


@pytest.mark.parametrize("failure", ["mpi", "start"])
def test_mpirun_starts_again_if_wrappers_cannot_go_on(start, tmp_path, failure):
    job, note = start(failure)
    assert note(1, 0)["wrapper"] != note(0, 0)["wrapper"]
    assert note(1, 0)["before"] == ["0-0", "0-1"]
    end(job, tmp_path)
    assert not Path(note(1, 0)["states"]).exists()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)]
)
def test_nothing_is_left_when_the_launcher_is_killed_or_stopped(start, poprun, number):
    job, note = start()
    os.kill(job.pid, number)
    job.communicate(timeout=30)
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not poprun.survivors() and not Path(note(1, 0)["states"]).exists(), 10)


def test_a_hang_after_a_restart_is_found(start):
    job, note = start("program", 1, "--hang-timeout", "1")
    _, stderr = job.communicate(timeout=30)
    assert job.returncode == 124, stderr
    assert "time.sleep(0.01)" in stderr
    assert not Path(note(1, 0)["states"]).exists()


ENDS_ALONE = """
import sys
import popdist_py
from popdist_py import context

popdist_py.init()
if popdist_py.getInstanceIndex() == 0:
    sys.exit(3)
context.communicator().all_gather_object("waits for instance 0")
"""


def test_the_exit_code_of_instance_0_is_the_jobs_if_others_wait_for_it(poprun, script):
    done = poprun(*OPTIONS, script(ENDS_ALONE), timeout=60)
    assert done.returncode == 3, done.stderr
    assert "instance 0 (replica 0)" in done.stderr
    assert "InstanceLostError" not in done.stderr
