"""One job on two hosts: what ``make test`` shows of several hosts (more in tests/lab)."""

from __future__ import annotations

import pytest
from lab.lab import Lab, missing
from support.processes import wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.hosts]

# Instance 1 fails after both have talked to each other by MPI and by our own sockets. Instance 0
# would go on for long.
PROGRAM = """
import socket, sys, time
import numpy as np
from mpi4py import MPI
import popdist_py

popdist_py.init()
index = popdist_py.getInstanceIndex()
names = MPI.COMM_WORLD.allgather(socket.gethostname())
total = popdist_py.all_reduce(np.full(1000, index + 1.0))
print(index, socket.gethostname(), *names, total[0], total[-1], flush=True)
popdist_py.barrier()
sys.exit(7) if index == 1 else time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if reason := missing():
        pytest.skip(f"two hosts cannot be made here: {reason}")
    with Lab(tmp_path_factory.mktemp("lab"), 2) as hosts:
        yield hosts


def test_instances_on_two_hosts_talk_to_each_other_and_a_failure_names_its_host(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2",
                         program)  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [
        f"[1,{index}]<stdout>:{index} node{index} node0 node1 3.0 3.0" for index in (0, 1)
    ], done.stderr
    assert done.returncode == 7
    assert "instance 1 (replica 1) on node1 failed first" in done.stderr
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 30, f"{host.name} keeps it")


# Both hosts connect without MPI, which cannot start twice under one wrapper. Instance 0 ends before
# the others make a group. In the first attempt, instance 3 is lost. For a script with an import
# statement of the library, the launcher would prepare torch, which takes nine seconds of CPU time.
WITHOUT_MPI = """
import importlib, os, signal, socket, sys

popdist_py = importlib.import_module("popdist_py")
heartbeat = importlib.import_module("popdist_py.heartbeat")
popdist_py.init()
index = popdist_py.getInstanceIndex()
heartbeat.step()
total = popdist_py.all_reduce(index + 1.0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    popdist_py.barrier()
pair = popdist_py.execute_on_instances({1, 2}, popdist_py.all_reduce, 1.0)
print(index, socket.gethostname(), total, pair, "mpi4py.MPI" in sys.modules, os.getppid())
"""


def test_instances_on_two_hosts_connect_without_mpi_after_a_restart_too(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_MPI)
    shape = ("--num-instances", "4", "--num-replicas", "4", "--oversubscribe")
    asked = ("--memory-checkpoints", "--max-restarts", "1")
    done = lab[0].poprun("--host", lab.names(), *shape, *asked, program)
    pairs = [None, 2.0, 2.0, None]
    assert sorted(line.rpartition(" ")[0] for line in done.stdout.splitlines()) == [
        f"[1,{index}]<stdout>:{index} node{index // 2} 10.0 {pair} False"
        for index, pair in enumerate(pairs)
    ], done.stderr
    assert "restarting the job at once (restart 1 of 1)" in done.stderr
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 30, f"{host.name} keeps it")
