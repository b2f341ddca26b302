"""All communicators satisfy one contract, alone, over MPI, in shared memory and over hosts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Way:
    """A way of joining, with its variables.

    ``owners`` is the number of instances that exchange slices with other hosts."""

    variables: str
    communicator: str = "GroupCommunicator"
    mesh: str = "NoneType"
    owners: int = 0


IN_SHARED_MEMORY = Way("")
WITHOUT_MPI = Way("POPDIST_MEMORY_CHECKPOINTS=1")
IN_TREE_ORDER = Way("POPDIST_DETERMINISTIC=1")
THROUGH_SLOTS = Way("TEST_WITHOUT_READING=1")
MPI = Way("POPDIST_SHARED_MEMORY=0,TEST_SMALL_MESSAGES=1", mesh="MpiMesh")
JOBS = {
    "solo": (1, [Way("", "SoloCommunicator")]),
    "two instances": (
        2,
        [
            IN_SHARED_MEMORY,
            WITHOUT_MPI,
            THROUGH_SLOTS,
            IN_TREE_ORDER,
            Way("TEST_NUM_HOSTS=2", mesh="TcpMesh", owners=2),
        ],
    ),
    "three instances": (
        3,
        [
            IN_SHARED_MEMORY,
            WITHOUT_MPI,
            Way("POPDIST_MEMORY_CHECKPOINTS=1,POPDIST_SHARED_MEMORY=0", mesh="TcpMesh"),
            THROUGH_SLOTS,
            MPI,
            Way("TEST_NUM_HOSTS=2,TEST_WITHOUT_SOCKETS=1,TEST_WITHOUT_READING=1", mesh="MpiMesh",
                owners=2),
            Way("TEST_NUM_HOSTS=2", mesh="TcpMesh", owners=2),
            Way("TEST_NUM_HOSTS=2,POPDIST_DETERMINISTIC=1", mesh="TcpMesh", owners=2),
        ],
    ),
    "two hosts with two instances": (4, [Way("TEST_NUM_HOSTS=2", mesh="TcpMesh", owners=4)]),
    "five instances": (5, [IN_SHARED_MEMORY]),
}  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        "solo",
        "two instances",
        pytest.param("three instances", marks=pytest.mark.sweep),
        # The default tests include a training of four instances on two hosts.
        pytest.param("two hosts with two instances", marks=pytest.mark.sweep),
        pytest.param("five instances", marks=pytest.mark.long),
    ],
)
def test_contract(request, job):
    """All instances make all checks for each way of joining."""
    count, ways = JOBS[job]
    words = [way.variables for way in ways]
    if count == 1:
        replies = [_make_all_checks(*words)]
    else:
        instances = request.getfixturevalue("instances")
        replies = instances.run(_make_all_checks, *words, count=count, limit=150)
    for number, way in enumerate(ways):
        found = [joined[number] for joined, _ in replies]
        assert [communicator for communicator, _ in found] == [way.communicator] * count
        meshes = [mesh for _, mesh in found]
        assert meshes.count(way.mesh) == (way.owners or count), way
    warned = [text for _, warnings in replies for text in warnings]
    assert len(warned) == sum("WITHOUT_SOCKETS" in way.variables for way in ways)
    assert all("the hosts do not reach one another by TCP on any network" in t for t in warned)


def _make_all_checks(*words):
    with mock.patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):
        import contract_program
    return contract_program.make_all_checks(*words)
