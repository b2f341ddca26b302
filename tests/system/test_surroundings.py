"""Jobs where something is missing that most machines have: a home, a name, room for files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from support.processes import wait_until
from support.surroundings import as_stranger, mounted

from poprun_py.command.cli import run

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


@pytest.mark.long
def test_a_user_without_a_name_or_a_home(poprun, tmp_path, open_folder):
    program = shutil.copy(PROGRAM, open_folder)
    cache = ("--executable-cache-path", open_folder / "cache")
    through = (*WITHOUT_A_HOME, *as_stranger(tmp_path))
    assert_trains(poprun(*JOB, *cache, program, cwd=open_folder, through=through))
    assert len(list((open_folder / "cache").iterdir())) == 2


@pytest.mark.sweep
def test_a_home_that_cannot_be_written(poprun, tmp_path, cache):
    home = tmp_path / "home"
    home.mkdir()
    done = poprun(*JOB, *cache, PROGRAM, env={"HOME": str(home)}, through=mounted(home, "ro"))
    assert_trains(done)
    assert f"not stored in the cache folder {home / 'cache'} (Read-only file system)" in done.stderr
    assert "choose a writable folder" in done.stderr


# A program is refused the first, mpirun the second.
@pytest.mark.parametrize("size", ["4k", pytest.param("64k", marks=pytest.mark.sweep)])
def test_a_folder_for_temporary_files_without_room(poprun, script, open_folder, size):
    # Its name is short enough for a Unix socket; otherwise /tmp would be taken.
    through = mounted(open_folder, f"size={size}")
    done = poprun(*JOB, script(COLLECTIVES), env={"TMPDIR": str(open_folder)}, through=through)
    assert done.returncode != 0
    reason = f"MPI needs space for its own files in {open_folder}"
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
    assert f"\n  MPI needs space for its own files in {open_folder}" in done.stderr


@pytest.mark.long
def test_shared_memory_that_takes_nothing(poprun):
    assert_trains(poprun(*JOB, PROGRAM, through=mounted(Path("/dev/shm"), "ro")))


@pytest.mark.sweep
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
    assert "num_workers=1: worker processes need shared memory, but /dev/shm" in done.stderr
    assert "with num_workers=0" in done.stderr


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


# Collectives of the library that a host's memory is best for, and MPI's own.
COLLECTIVES = """
import numpy as np
import popdist_py
from mpi4py import MPI
popdist_py.init()
for size in (1, 1_000_000):
    total = popdist_py.all_reduce(np.ones(size))
    theirs = MPI.COMM_WORLD.allreduce(1)
    print("total", total.min(), total.max(), theirs)
"""
REFUSED = Path(__file__).parents[1] / "support" / "refused_calls.py"
TRACING = "ptrace,process_vm_readv,process_vm_writev,pidfd_getfd,pidfd_open,kcmp"


def assert_adds_up(done, num_instances=2):
    assert done.returncode == 0, done.stderr
    expected = f"total {num_instances}.0 {num_instances}.0 {num_instances}"
    assert done.stdout.count(expected) == 2 * num_instances


@pytest.mark.sweep
def test_a_home_that_is_not_there(poprun, script):
    assert_adds_up(poprun(*JOB, script(COLLECTIVES), env={"HOME": "/nonexistent"}))


@pytest.mark.sweep
def test_a_folder_for_temporary_files_that_cannot_be_written(poprun, script, tmp_path):
    # The launcher's own files and those of MPI then go to /tmp.
    program, through = script(COLLECTIVES), mounted(tmp_path / "t", "ro")
    (tmp_path / "t").mkdir()
    env = {"TMPDIR": str(tmp_path / "t")}
    assert_adds_up(poprun(*JOB, program, cwd="/", env=env, through=through))


@pytest.mark.sweep
def test_a_system_that_lets_nobody_look_at_other_processes(poprun, script):
    done = poprun(*JOB, "-v", script(COLLECTIVES), through=(sys.executable, REFUSED, TRACING))
    assert_adds_up(done)
    assert (
        done.stderr.count("mpirun listens on every address of this machine: the system does") == 1
    )


@pytest.mark.sweep
def test_hangs_and_failures_where_nobody_looks_at_other_processes(poprun, script):
    through = (sys.executable, REFUSED, TRACING)
    sleeping = script("import time\ntime.sleep(100)\n", "sleeping.py")
    done = poprun(*JOB, "--hang-timeout", 0.5, "--grace", 1, sleeping, through=through)
    assert done.returncode == 124
    assert "the Python stacks of the instances:\ninstances 0-1 (2):" in done.stderr
    assert "time.sleep(100)" in done.stderr
    failing = script("import os\nos.kill(os.getpid(), 11)\n", "failing.py")
    assert poprun(*JOB, failing, through=through).returncode == 139


@pytest.mark.sweep
def test_a_user_who_sees_no_processes_of_others(poprun, tmp_path, open_folder):
    """The launcher itself is process 1 there."""
    program = open_folder / "program.py"
    program.write_text(COLLECTIVES)
    hidden = ("unshare", "-m", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c",
              'mount -o remount,hidepid=2 /proc && exec "$@"', "sh")  # fmt: skip
    through = (*hidden, *as_stranger(tmp_path))
    assert_adds_up(poprun(*JOB, program, cwd=open_folder, through=through))


@pytest.mark.sweep
def test_instances_that_cannot_share_memory_say_once_how_slow_that_is(poprun, script):
    refused = (sys.executable, REFUSED, "memfd_create", sys.executable, script(COLLECTIVES))
    done = poprun(*JOB, *refused)
    assert_adds_up(done)
    told = [line for line in done.stderr.splitlines() if "cannot share memory" in line]
    assert len(told) == 1
    assert "Operation not permitted" in told[0]
    assert "take 2 to 20 times as long" in told[0]
    quiet = poprun(*JOB, *refused, env={"POPDIST_SHARED_MEMORY": "0"})
    assert_adds_up(quiet)
    assert "share memory" not in quiet.stderr


@pytest.mark.sweep
def test_a_system_without_files_in_memory(poprun, script):
    """As with vm.memfd_noexec=2: for the launcher and the wrappers too."""
    through = (sys.executable, REFUSED, "memfd_create")
    assert_adds_up(poprun(*JOB, script(COLLECTIVES), through=through))
    sleeping = script("import time\ntime.sleep(100)\n", "sleeping.py")
    done = poprun(*JOB, "--hang-timeout", 0.5, "--grace", 1, sleeping, through=through)
    assert done.returncode == 124
    assert "time.sleep(100)" in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["size=1m", pytest.param("ro", marks=pytest.mark.long)])
def test_eight_instances_with_little_shared_memory(poprun, script, how):
    """Nothing of the library's lies in /dev/shm, and MPI takes what there is."""
    through = mounted(Path("/dev/shm"), how)
    done = poprun("--num-instances", 8, "--oversubscribe", script(COLLECTIVES), through=through)
    assert_adds_up(done, 8)
    told = "/dev/shm has only 1 MiB free, but MPI needs 16 MiB" in done.stderr
    assert told == (how == "size=1m"), done.stderr
    assert done.stderr.count("about 4 times as long") == told


FILLS_SHARED_MEMORY = """
import os, signal
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
with open("/dev/shm/full", "wb", buffering=0) as file:
    try:
        while file.write(bytes(1 << 16)):
            pass
    except OSError as error:
        print(error)
os.kill(os.getpid(), signal.SIGBUS)  # as MPI does at its next large message
"""


def test_shared_memory_that_is_full_in_the_middle_of_a_job(poprun, script):
    through = mounted(Path("/dev/shm"), "size=40m")
    done = poprun(script(FILLS_SHARED_MEMORY), through=through)
    assert done.returncode == 128 + 7
    assert "No space left on device" in done.stdout
    assert "\n  /dev/shm is full, but MPI passes messages within a host" in done.stderr
    assert "docker run --shm-size=1g" in done.stderr


# Says what this user's folder for the job is like, and leaves when the other user's job is there.
BESIDE = """
import os, pathlib, sys, time
import popdist_py
from mpi4py import MPI
popdist_py.init()
here, name, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
folder = pathlib.Path(os.environ["POPRUN_CONTROL"].partition(":")[2]).parent
print("folder", oct(folder.stat().st_mode & 0o777), folder.stat().st_uid == os.getuid(), folder)
(here / f"{name}-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
limit = time.monotonic() + 60
while time.monotonic() < limit and not (here / other).exists():
    time.sleep(0.01)
print("total", MPI.COMM_WORLD.allreduce(1), popdist_py.all_reduce(1.0))
"""


@pytest.mark.sweep
def test_two_users_side_by_side_in_a_folder_of_their_group(poprun, tmp_path, open_folder):
    """Temporary files of both lie in one folder that their group may write; one job is killed."""
    open_folder.chmod(0o2777)
    program = open_folder / "program.py"
    program.write_text(BESIDE)
    shared = open_folder / "shared"
    shared.mkdir()
    shutil.chown(shared, 65534, 54321)
    shared.chmod(0o2775)
    words = ("--num-instances", 2, "--oversubscribe", "--share-cores", "yes", program, open_folder)
    settings = {
        "start": True,
        "cwd": open_folder,
        "env": {"TMPDIR": str(shared), "POPRUN_LEASES": str(open_folder / "leases")},
    }
    group = ("sh", "-c", 'umask 002; exec "$@"', "sh")
    stranger = (*WITHOUT_A_HOME, *as_stranger(tmp_path))
    ours = poprun(*words, "ours", "end", through=group, **settings)
    theirs = poprun(*words, "theirs", "killed", through=(*group, *stranger), **settings)
    for name in ("ours", "theirs"):
        wait_until(lambda name=name: len(list(open_folder.glob(f"{name}-*"))) == 2, 60)
    folders = list(shared.iterdir())
    assert sorted(each.stat().st_uid for each in folders) == [0, 54321]
    assert {each.stat().st_mode & 0o777 for each in folders} == {0o700}
    theirs.kill()
    theirs.communicate(timeout=60)
    pids = [int(each.read_text()) for each in open_folder.glob("theirs-*")]
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids))
    assert ours.poll() is None
    (open_folder / "end").touch()
    stdout, stderr = ours.communicate(timeout=60)
    assert ours.returncode == 0, stderr
    assert stdout.count("total 2 2.0") == 2
    assert stdout.count("folder 0o700 True") == 2
    assert not [each for each in shared.iterdir() if each.stat().st_uid == 0]


@pytest.mark.sweep
def test_paths_that_are_not_utf_8(poprun, open_folder):
    folder = open_folder / os.fsdecode(b"folder\xff")
    folder.mkdir()
    program = folder / os.fsdecode(b"program\xff.py")
    program.write_text("import popdist_py; popdist_py.init(); exit(5)")
    names = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    done = poprun(
        *JOB, "-v", "--output-dir", "out", program, cwd=folder,
        env=dict.fromkeys(names, str(folder)),
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert (folder / "out" / "latest" / "report.html").is_file()
    page = str(open_folder / "page.html")
    assert run(["report", str(folder / "out" / "latest"), "--output", page]) == 0
