"""Ends of a job that only real processes show: signals to all of them, and MPI left halfway."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import wait_until

pytestmark = pytest.mark.mpi

# It saves for longer than mpirun would let it: half a second.
SAVES = """
import signal, sys, time

def save(number, _):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""


def test_sigterm_to_all_processes_of_a_job_leaves_the_grace_time(poprun, script):
    """As systemd and Slurm send it: to the launcher, mpirun, the wrappers and the programs."""
    job = poprun(
        "--num-instances", 2, "--num-replicas", 2, "--output", "plain", script(SAVES), start=True
    )
    for _ in range(2):
        assert job.stdout.readline() == "ready\n"
    wait_until(lambda: len(poprun.survivors()) == 6)
    for pid in poprun.survivors():
        os.kill(pid, signal.SIGTERM)
    stdout, stderr = job.communicate(timeout=60)
    assert (job.returncode, stdout) == (143, "saved\nsaved\n"), stderr
    assert stderr == ""


ENDS_WITHOUT_FINALIZE = """
import os
from mpi4py import MPI

MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    os._exit(0)
MPI.COMM_WORLD.recv(source=0)
"""


@pytest.mark.sweep
def test_a_job_ends_if_an_instance_leaves_mpi_without_finalizing(poprun, script):
    done = poprun("--num-instances", 2, "--num-replicas", 2, script(ENDS_WITHOUT_FINALIZE))
    assert done.returncode == 1
    assert "instance 0 ended with exit code 0 but without MPI_Finalize" in done.stderr
