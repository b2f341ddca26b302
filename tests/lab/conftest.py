"""Hosts for tests: ``lab`` and ``cluster`` are shared by all modules, ``make_lab(n)`` builds more.

Two workers of xdist may run tests at the same time. Each of them has labs of its own, and labs see
nothing of one another.
"""

from __future__ import annotations

import os

import pytest
from lab import slurm
from lab.lab import Lab, missing
from lab.slurm import Slurm


@pytest.fixture(scope="session")
def lab_permitted():
    """Skip where there can be no lab; in CI that is an error."""
    reason = missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"no lab of hosts: {reason}")
    if reason:
        pytest.skip(f"no lab of hosts: {reason}")


@pytest.fixture(scope="session")
def lab(lab_permitted, tmp_path_factory):
    """Two hosts that all tests of a worker share and leave as they were."""
    with Lab(tmp_path_factory.mktemp("lab"), 2) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def cluster(lab_permitted, tmp_path_factory):
    """Two more hosts with Slurm, which all tests of a worker share and leave as they were."""
    reason = slurm.missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with Lab(tmp_path_factory.mktemp("cluster"), 2) as hosts:
        yield Slurm(hosts)


@pytest.fixture
def make_lab(lab_permitted, tmp_path_factory):
    """Build hosts that a test may break."""
    made = []

    def make(num_hosts: int) -> Lab:
        hosts = Lab(tmp_path_factory.mktemp("lab"), num_hosts)
        made.append(hosts)
        return hosts.__enter__()

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture
def hello(tmp_path):
    """A program that says where each instance runs, through MPI and through the wire."""
    path = tmp_path / "hello.py"
    path.write_text(
        "import socket\n"
        "from mpi4py import MPI\n"
        "import popdist_py as popdist\n"
        "names = MPI.COMM_WORLD.allgather(socket.gethostname())\n"
        "print(popdist.getInstanceIndex(), socket.gethostname(), *names)\n"
    )
    return path
