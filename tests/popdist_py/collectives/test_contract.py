"""One contract for all communicators: alone, through MPI, in shared memory, and over hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("contract_program.py")

KINDS = {
    "solo": (1, {}, "SoloCommunicator"),
    "mpi": (3, {"POPDIST_SHARED_MEMORY": "0"}, "MpiCommunicator"),
    "two instances": (2, {}, "SharedCommunicator"),
    "two instances through slots": (2, {"TEST_WITHOUT_READING": "1"}, "SharedCommunicator"),
    "three instances through slots": (3, {"TEST_WITHOUT_READING": "1"}, "SharedCommunicator"),
    "more instances than cores": (5, {}, "SharedCommunicator"),
    "one instance on each host": (2, {"TEST_NUM_HOSTS": "2"}, "SharedCommunicator"),
    "hosts with 2 and 1 instances": (3, {"TEST_NUM_HOSTS": "2"}, "SharedCommunicator"),
    "hosts with 2 instances": (4, {"TEST_NUM_HOSTS": "2"}, "SharedCommunicator"),
    "three hosts": (3, {"TEST_NUM_HOSTS": "3"}, "SharedCommunicator"),
    "hosts without sockets": (
        3,
        {"TEST_NUM_HOSTS": "2", "TEST_WITHOUT_SOCKETS": "1", "TEST_WITHOUT_READING": "1"},
        "SharedCommunicator",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contract(poprun, kind):
    instances, environment, name = KINDS[kind]
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe", PROGRAM,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"{name} 10 checks") == instances
    if "TEST_NUM_HOSTS" in environment:
        group = "MpiGroup" if "TEST_WITHOUT_SOCKETS" in environment else "TcpGroup"
        owners = 2 if "2 and 1" in kind or group == "MpiGroup" else instances
        assert done.stdout.count(f"checks, {group}") == owners
    warnings = done.stderr.count("the hosts do not reach one another by TCP on any network")
    assert warnings == ("TEST_WITHOUT_SOCKETS" in environment)
