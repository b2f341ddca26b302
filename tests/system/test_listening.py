"""What a job listens on while it runs, read back from the kernel."""

from __future__ import annotations

import textwrap

import psutil
import pytest
from support.listening import Listening, an_mpi, of_processes
from support.processes import wait_until

pytestmark = pytest.mark.mpi

# The instances wait until the test has looked at all processes of their job.
PROGRAM = """
import os, time
{start}
MPI.COMM_WORLD.barrier()
if MPI.COMM_WORLD.rank == 0:
    os.mkdir("ready")
limit = time.monotonic() + 40
while not os.path.exists("seen") and time.monotonic() < limit:
    time.sleep(0.01)
MPI.COMM_WORLD.barrier()
"""
JOB = ("--num-instances", "2", "--num-replicas", "2")
STARTS = {
    "popdist": "import popdist_py; popdist_py.init(); from mpi4py import MPI",
    "mpi4py": "from mpi4py import MPI",
    "explicit": "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; MPI.Init_thread()",
    # No MPI, but what takes its place above.
    "gloo": "import torch.distributed as dist, types; dist.init_process_group('gloo')\n"
    "world = types.SimpleNamespace(rank=dist.get_rank(), barrier=dist.barrier)\n"
    "MPI = types.SimpleNamespace(COMM_WORLD=world)",
}
LOOPBACK = {"127.0.0.1", "::1"}


def seen(poprun, tmp_path, *words) -> list[Listening]:
    """Run a job whose program waits, and return what all of its processes listen on."""
    job = poprun(*JOB, *words, start=True)
    wait_until((tmp_path / "ready").exists, 60, "the program did not come that far")
    launcher = psutil.Process(job.pid)
    found = of_processes([job.pid, *(each.pid for each in launcher.children(recursive=True))])
    (tmp_path / "seen").mkdir()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    return found


@pytest.mark.parametrize(
    ("mpi", "start"),
    [
        ("Open MPI 5", "popdist"),
        ("MPICH", "popdist"),
        *(
            pytest.param(mpi, start, marks=pytest.mark.sweep)
            for mpi, start in (
                ("Open MPI 5", "explicit"),
                ("Open MPI 5", "gloo"),
                ("Open MPI 4", "popdist"),
                ("Open MPI 4", "explicit"),
                ("MPICH", "mpi4py"),
            )
        ),
    ],
)
def test_a_job_on_one_host_listens_on_loopback_alone(poprun, script, tmp_path, mpi, start):
    program = script(PROGRAM.format(start=STARTS[start]))
    found = seen(poprun, tmp_path, *an_mpi(mpi), program)
    assert {each.address for each in found} <= LOOPBACK
    names = {each.name for each in found}
    assert names >= {"prterun", "python"} or mpi != "Open MPI 5"
    assert names & {"prterun", "mpirun", "orterun", "orterun_wrapper"}


@pytest.mark.sweep
def test_processes_that_are_started_later_are_reached_over_loopback(poprun, script):
    program = script(
        textwrap.dedent(
            """
            import sys
            from mpi4py import MPI
            parent = MPI.Comm.Get_parent()
            if parent == MPI.COMM_NULL:
                if MPI.COMM_WORLD.rank == 0:
                    child = MPI.COMM_SELF.Spawn(sys.executable, [__file__], maxprocs=1)
                    print("from the child:", child.recv(source=0), flush=True)
                    child.Disconnect()
                MPI.COMM_WORLD.barrier()
            else:
                parent.send(b"x" * 100_000 and "hello", 0)
                parent.Disconnect()
            """
        )
    )
    ended = poprun(*JOB, program)
    assert ended.returncode == 0, ended.stderr
    assert "from the child: hello" in ended.stdout


def test_without_shared_memory_messages_go_over_loopback(poprun, script, tmp_path):
    program = script(PROGRAM.format(start=STARTS["mpi4py"]))
    found = seen(poprun, tmp_path, "--mpi-global-args", "--mca btl self,tcp", program)
    assert {each.address for each in found} <= LOOPBACK


@pytest.mark.sweep
def test_jobs_start_however_mpirun_waits_when_its_sockets_move(poprun):
    mpi = an_mpi("MPICH")
    for _ in range(10):
        ended = poprun(*mpi, "--num-instances", "1", "--num-replicas", "1", "true")
        assert ended.returncode == 0, ended.stderr
