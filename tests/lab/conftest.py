"""Hosts for any test that asks: ``make_lab(n)`` builds a lab of its own, ``lab`` is shared."""

from __future__ import annotations

import os

import pytest
from lab.lab import Lab, missing


@pytest.fixture(scope="session")
def lab_permitted():
    """Skip where there can be no lab; in CI that is an error."""
    reason = missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"no lab of hosts: {reason}")
    if reason:
        pytest.skip(f"no lab of hosts: {reason}")


@pytest.fixture(scope="module")
def lab(lab_permitted, tmp_path_factory):
    """Two hosts that the tests of a module share and leave as they were."""
    with Lab(tmp_path_factory.mktemp("lab"), 2) as hosts:
        yield hosts


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
