"""What a job on several hosts listens on, read back from the kernel of each host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lab.lab import Lab, LabHost
from support.listening import Listening, all_in_network_of, an_mpi
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

# The instances wait until the test has looked at all processes of their hosts.
PROGRAM = """
import os, sys, time
folder = sys.argv[1]
{start}
if rank == 0:
    os.mkdir(folder + "/ready")
limit = time.monotonic() + 60
while not os.path.exists(folder + "/seen") and time.monotonic() < limit:
    time.sleep(0.01)
print("size", count(), flush=True)
"""
MPI = """
import popdist_py
popdist_py.init()
from mpi4py import MPI
MPI.COMM_WORLD.Bcast(bytearray(100_000))
rank, count = MPI.COMM_WORLD.rank, lambda: MPI.COMM_WORLD.allreduce(1)
"""
GLOO = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def count():
    ones = torch.ones(1, dtype=int)
    dist.all_reduce(ones)
    return ones.item()
count()
rank = dist.get_rank()
"""
# Of hosts, beside the job's network: it is to carry nothing.
OTHER = "10.98.0"


@pytest.fixture(scope="module")
def lab(lab_permitted, tmp_path_factory):
    """Two hosts on two networks, which see the other MPIs as well."""
    folders = filter(None, os.environ.get("TEST_MPIS", "").split(os.pathsep))
    visible = tuple({Path(each).resolve() for each in folders})
    with Lab(tmp_path_factory.mktemp("lab"), 2, visible) as hosts:
        for number, host in enumerate(hosts.hosts, start=1):
            for words in ("link add other type veth peer name end",
                          f"address add {OTHER}.{number}/24 dev other",
                          "link set other up", "link set end up"):  # fmt: skip
                done = host.run("ip", *words.split(), env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})
                assert done.returncode == 0, done.stderr
        yield hosts


def listening_on(host: LabHost) -> list[Listening]:
    """Return what the processes of a job on a host listen on."""
    return [each for each in all_in_network_of(host.init_pid) if each.name != "sshd"]


@pytest.mark.parametrize(
    ("mpi", "start"),
    [("Open MPI 5", MPI), ("Open MPI 4", MPI), ("MPICH", MPI), ("Open MPI 5", GLOO)],
    ids=["Open MPI 5", "Open MPI 4", "MPICH", "gloo"],
)
def test_a_job_listens_on_its_network_and_on_loopback_alone(lab, tmp_path, mpi, start):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(start=start), encoding="utf-8")
    job = lab[0].start(
        sys.executable, "-m", "poprun_py", *an_mpi(mpi), "--host", lab.names(2),
        "--num-instances", "4", "--num-replicas", "4", program, tmp_path,
    )  # fmt: skip
    try:
        wait_until(lambda: (tmp_path / "ready").exists() or job.poll() is not None, 90)
        found = [listening_on(host) for host in lab.hosts]
        (tmp_path / "seen").mkdir()
        stdout, stderr = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, stderr
    assert stdout.count("size 4") == 4
    for host, each in zip(lab.hosts, found, strict=True):
        assert {one.address for one in each} <= {host.address, "127.0.0.1", "::1"}, each
        assert host.address in {one.address for one in each if one.name == "python"}
    if mpi != "MPICH":
        # Its proxies do not listen.
        assert {one.name for one in found[1]} & {"prted", "orted"}
