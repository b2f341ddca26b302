"""One contract for all communicators: alone, through MPI, in shared memory, and over hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("contract_program.py")


@dataclass(frozen=True)
class Way:
    """A way of joining, by variables; ``owners`` instances own slices that go to other hosts."""

    variables: str
    communicator: str = "SharedCommunicator"
    group: str = "NoneType"
    owners: int = 0


IN_SHARED_MEMORY = Way("")
THROUGH_SLOTS = Way("TEST_WITHOUT_READING=1")
MPI = Way("POPDIST_SHARED_MEMORY=0,TEST_SMALL_MESSAGES=1", "MpiCommunicator")
# One job for each number of instances: what it costs is the start.
JOBS = {
    "solo": (1, [Way("", "SoloCommunicator")]),
    "two instances": (
        2, [IN_SHARED_MEMORY, THROUGH_SLOTS, Way("TEST_NUM_HOSTS=2", group="TcpGroup", owners=2)]
    ),
    "three instances": (
        3,
        [
            MPI,
            Way("TEST_NUM_HOSTS=2,TEST_WITHOUT_SOCKETS=1,TEST_WITHOUT_READING=1", group="MpiGroup",
                owners=2),
            Way("TEST_NUM_HOSTS=3", group="TcpGroup", owners=3),
        ],
    ),
    "three instances in further ways": (
        3,
        [
            IN_SHARED_MEMORY,
            THROUGH_SLOTS,
            Way("TEST_NUM_HOSTS=2", group="TcpGroup", owners=2),
        ],
    ),
    "two hosts with two instances": (4, [Way("TEST_NUM_HOSTS=2", group="TcpGroup", owners=4)]),
    "five instances": (5, [IN_SHARED_MEMORY]),
}  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        "solo",
        "two instances",
        pytest.param("three instances", marks=pytest.mark.sweep),
        pytest.param("three instances in further ways", marks=pytest.mark.long),
        # Training of four instances on two hosts is among the default tests.
        pytest.param("two hosts with two instances", marks=pytest.mark.sweep),
        pytest.param("five instances", marks=pytest.mark.long),
    ],
)
def test_contract(poprun, warm, job):
    """In each way of joining, all instances make all checks."""
    instances, ways = JOBS[job]
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe",
        *warm, PROGRAM, *(way.variables for way in ways), timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    for way in ways:
        said = f"[{way.variables}] {way.communicator} 16 checks, "
        assert done.stdout.count(said) == instances, said
        if way.owners:
            assert done.stdout.count(f"{said}{way.group}") == way.owners, said
    warnings = done.stderr.count("the hosts do not reach one another by TCP on any network")
    assert warnings == sum("WITHOUT_SOCKETS" in way.variables for way in ways)
