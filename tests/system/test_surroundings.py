"""Jobs where something is missing that most machines have: a home, a name, room for files."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from support.surroundings import as_stranger, mounted

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("surroundings_program.py")
JOB = ("--num-instances", 2, "--num-replicas", 4)
WITHOUT_A_HOME = ("env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME")


def assert_trains(done):
    assert done.returncode == 0, done.stderr
    for index in range(2):
        assert f"instance {index} trained 2 steps" in done.stdout


@pytest.fixture
def cache(tmp_path):
    """The option that caches executables in the home folder, as it is in a job's environment."""
    return ("--executable-cache-path", tmp_path / "home" / "cache")


@pytest.fixture
def open_folder():
    """A folder that everybody may enter and write; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.sweep
def test_a_user_without_a_name_or_a_home(poprun, tmp_path, open_folder):
    program = shutil.copy(PROGRAM, open_folder)
    cache = ("--executable-cache-path", open_folder / "cache")
    through = (*WITHOUT_A_HOME, *as_stranger(tmp_path))
    assert_trains(poprun(*JOB, *cache, program, cwd=open_folder, through=through))
    assert len(list((open_folder / "cache").iterdir())) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("home", ["", "/nonexistent"])
def test_a_home_that_is_not_there(poprun, home):
    assert_trains(poprun(*JOB, PROGRAM, env={"HOME": home}))


@pytest.mark.sweep
def test_a_home_that_cannot_be_written(poprun, tmp_path, cache):
    home = tmp_path / "home"
    home.mkdir()
    done = poprun(*JOB, *cache, PROGRAM, env={"HOME": str(home)}, through=mounted(home, "ro"))
    assert_trains(done)
    assert f"not cached in {home / 'cache'} (Read-only file system)" in done.stderr
    assert "choose a folder that can be written" in done.stderr


@pytest.mark.sweep
def test_a_folder_for_temporary_files_that_cannot_be_written(poprun, tmp_path):
    # The launcher's own files and those of MPI then go to /tmp.
    through = mounted(tmp_path, "ro")
    assert_trains(poprun(*JOB, PROGRAM, cwd="/", env={"TMPDIR": str(tmp_path)}, through=through))


# A program is refused the first, mpirun the second.
@pytest.mark.parametrize("size", ["64k", "4k"])
def test_a_folder_for_temporary_files_without_room(poprun, open_folder, size):
    # Its name is short enough for a Unix socket; otherwise /tmp would be taken.
    through = mounted(open_folder, f"size={size}")
    done = poprun(*JOB, PROGRAM, env={"TMPDIR": str(open_folder)}, through=through)
    assert done.returncode != 0
    reason = f"MPI keeps files of its own in {open_folder}"
    explained = [line for line in done.stderr.splitlines() if reason in line]
    assert len(explained) == 1, done.stderr
    assert "set TMPDIR to another folder" in explained[0]
    assert "Traceback" not in done.stderr


FULL = """
import os, pathlib
with open(pathlib.Path(os.environ["TMPDIR"], "full"), "wb") as file:
    for _ in range(100):
        file.write(b"x" * (1 << 20))
"""


def test_a_folder_for_temporary_files_that_a_program_fills(poprun, script, open_folder):
    program, through = script(FULL), mounted(open_folder, "size=64m")
    done = poprun(program, env={"TMPDIR": str(open_folder)}, through=through)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert f"\n  MPI keeps files of its own in {open_folder}" in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["ro", "size=64k"])
def test_shared_memory_that_takes_nothing(poprun, how):
    assert_trains(poprun(*JOB, PROGRAM, through=mounted(Path("/dev/shm"), how)))


def test_workers_without_shared_memory_say_what_to_do(poprun, script):
    program = script(
        "import torch\n"
        "from popdist_py import poptorch\n"
        "data = torch.utils.data.TensorDataset(torch.ones(4, 2))\n"
        "list(poptorch.DataLoader(poptorch.Options(), data, num_workers=1))\n"
    )
    through = mounted(Path("/dev/shm"), "ro")
    done = poprun("--num-instances", 1, "--num-replicas", 1, program, through=through)
    assert done.returncode == 1
    assert "num_workers=1: worker processes need shared memory, and /dev/shm" in done.stderr
    assert "or load with num_workers=0" in done.stderr


STALE = """#!/bin/sh
case "$*" in *--version*) exec {mpirun} "$@";; esac
mkdir -m 700 "$TMPDIR/ompi.$$" && touch "$TMPDIR/ompi.$$/pmix.$(hostname).tool"
exec {mpirun} "$@"
"""


def test_files_of_a_killed_mpirun_with_the_same_process_id(poprun, tmp_path):
    # Open MPI names its folder after its process id, and refuses to start in one that is there.
    starter = tmp_path / "mpirun"
    starter.write_text(STALE.format(mpirun=Path(sys.executable).parent / "mpirun"))
    starter.chmod(0o755)
    done = poprun("--num-instances", 2, "--mpi", starter, "true", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (left,) = tmp_path.glob("ompi.*")
    assert [path.suffix for path in left.iterdir()] == [".tool"]
    assert not list(tmp_path.glob("poprun-*"))
