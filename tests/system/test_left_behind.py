"""Whoever of a job is killed, at whatever moment: nothing is left, or the next start removes it.

A job that lives beside it keeps everything.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from pathlib import Path

import pytest
from support import shared_memory_program
from support.processes import remove_surroundings, running_jobs, wait_until

from poprun_py.instance import process_control
from poprun_py.instance.job_folders import SHARED_MEMORY

pytestmark = pytest.mark.mpi

PROGRAM = shared_memory_program.__file__
PHASES = ("before", "training", "end")
KINDS = ("launcher", "mpirun", "wrapper", "program")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(KINDS, size)]
# Nobody is left who could remove anything; the wrappers are; mpirun alone would.
FEW = [(("launcher", "wrapper"), "training"), (("launcher", "mpirun"), "training"),
       (("mpirun",), "end")]  # fmt: skip


class Place:
    """A temporary folder that jobs have in common, and the files of them in there and in memory."""

    def __init__(self) -> None:
        # Its path is short: sockets lie in there.
        self.folder = Path(tempfile.mkdtemp())
        self.options = ("--num-instances", "2", "--num-replicas", "2", "--share-cores", "yes")
        self.env = {"TMPDIR": str(self.folder)}

    def left(self, pid: int) -> list[str]:
        """Return the folders and sockets of the job of a launcher, and what MPI has beside them."""
        own = f"poprun-{pid}-"
        names = [
            str(path)
            for base in (self.folder, Path(SHARED_MEMORY))
            for path in base.glob(f"{own}*")
        ]
        sockets = [line for line in Path("/proc/net/unix").read_text().split() if own in line]
        return names + sockets

    def unknown(self, pids: tuple[int, ...]) -> list[str]:
        """Return what lies in the folder and belongs to none of these launchers."""
        known = tuple(f"poprun-{pid}-" for pid in pids)
        return [p.name for p in self.folder.iterdir() if not p.name.startswith(known)]


@pytest.fixture(scope="module")
def place():
    made = Place()
    yield made
    assert list(made.folder.iterdir()) == []
    made.folder.rmdir()


def start(call, place, notes, phase):
    """Start a job; returns its launcher once its programs wait in a phase."""
    notes.mkdir()
    job = call(*place.options, PROGRAM, notes, phase, env=place.env, start=True)
    wait_until(lambda: len(list(notes.iterdir())) == 2 or job.poll() is not None, 90)
    assert job.poll() is None, job.communicate()
    return job


def processes_of(launcher: int) -> dict[str, list[int]]:
    mpirun = children([launcher])
    wrappers = children(mpirun)
    return dict(zip(KINDS, ([launcher], mpirun, wrappers, children(wrappers)), strict=True))


def children(parents):
    return [
        int(pid)
        for parent in parents
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ]


@pytest.fixture(scope="module")
def neighbour(place, tmp_path_factory):
    """A job that lives; afterwards all of its own folders are there, and it goes on."""
    folder = tmp_path_factory.mktemp("neighbour")
    with pytest.MonkeyPatch.context() as patch, running_jobs(folder) as call:
        remove_surroundings(patch)
        job = start(call, place, folder / "notes", "training")
        before = place.left(job.pid)
        yield job
        assert place.left(job.pid) == before
        seen = (folder / "notes/instance-1").stat().st_mtime_ns
        wait_until(lambda: (folder / "notes/instance-1").stat().st_mtime_ns > seen)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
        assert place.left(job.pid) == []


def check(poprun, place, neighbour, notes, killed, phase):
    job = start(poprun, place, notes, phase)
    found = processes_of(job.pid)
    assert [len(pids) for pids in found.values()] == [1, 1, 2, 2]
    pids = [pid for kind in killed for pid in found[kind]]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # at once, as far as that goes
        for pid in pids:
            process_control.signal_process(pid, number)
    job.communicate(timeout=60)
    wait_until(lambda: not poprun.survivors())
    if not {"launcher", "wrapper"} <= set(killed):
        # Whoever was left of those has done it.
        assert place.left(job.pid) == []
        return
    after = poprun(*place.options, "true", env=place.env)
    assert after.returncode == 0, after.stderr
    assert place.left(job.pid) == []
    assert place.unknown((neighbour.pid,)) == []


@pytest.mark.parametrize(("killed", "phase"), FEW)
def test_nothing_is_left_of_a_job_that_was_killed(
    poprun, place, neighbour, tmp_path, killed, phase
):
    check(poprun, place, neighbour, tmp_path / "notes", killed, phase)


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_left_whoever_is_killed_whenever(poprun, place, neighbour, tmp_path, phase):
    for number, killed in enumerate(SUBSETS):
        check(poprun, place, neighbour, tmp_path / str(number), killed, phase)


def test_all_shared_memory_with_a_name_lies_in_the_jobs_folder(place, neighbour):
    """Open MPI's segments and windows: what the instances map and others could find."""
    names = set()
    for pid in processes_of(neighbour.pid)["program"]:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and path[0].startswith((SHARED_MEMORY, os.environ["TMPDIR"])):
                names.add(
                    path[0].removeprefix(f"{place.folder}/").removeprefix(f"{SHARED_MEMORY}/")
                )
    assert names
    assert {name for name in names if not name.startswith(f"poprun-{neighbour.pid}-")} == set()


# As DataLoader's workers hand over tensors: by descriptors, which wait at a socket in a folder.
LOADING = """
import multiprocessing, os, time
from multiprocessing.reduction import DupFd

def work(pipe):
    pipe.send(DupFd(os.open("/dev/zero", os.O_RDONLY)))
    time.sleep(1000)

pipe, theirs = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
handed = pipe.recv()
print("handed over", os.read(handed.detach(), 1), flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("a bad item")
time.sleep(60)
"""


@pytest.mark.sweep
def test_no_sockets_of_a_loaders_workers_are_left(poprun, place, script):
    """Instance 1 ends by an exception, instance 0 by a signal."""
    done = poprun(*place.options, script(LOADING), env=place.env)
    assert done.returncode == 1
    assert "<stdout>:handed over" in done.stdout
    assert "instance 1 (replica 1)" in done.stderr.splitlines()[-3]
    assert "ValueError: a bad item" in done.stderr
    assert [path.name for path in place.folder.iterdir() if path.name.startswith("pymp-")] == []
