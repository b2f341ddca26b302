"""What instances on several hosts listen on, read back from the kernel of each."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]

PROGRAM = """
import os, psutil
import popdist_py
popdist_py.init()
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
for each in psutil.Process().net_connections("inet"):
    if each.status == psutil.CONN_LISTEN:
        print("listens", MPI.COMM_WORLD.rank, each.laddr.ip, flush=True)
print("total", MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), flush=True)
"""


def test_instances_listen_on_the_network_of_the_job_alone(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = lab[0].poprun(
        "--host", lab.names(2), "--num-instances", "2", "--num-replicas", "2", program
    )
    assert done.returncode == 0, done.stderr
    words = [line.rpartition(">:")[2].split() for line in done.stdout.splitlines()]
    assert ["total", "3"] in words
    found = {(int(each[1]), each[2]) for each in words if each[0] == "listens"}
    networks = [entry for entry in found if entry[1] != "::1"]
    assert {rank for rank, _ in networks} == {0, 1}
    assert all(address.startswith("10.") for _, address in networks), found
