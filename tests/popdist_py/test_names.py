"""PopDist's functions and public names, without the launcher and as one instance of a job."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import popdist_py as popdist
from popdist_py.environment import InstanceEnvironment

ALONE = {
    "isPopdistEnvSet": False,
    "getNumTotalReplicas": 1,
    "getNumLocalReplicas": 1,
    "getNumIpusPerReplica": 1,
    "getReplicaIndexOffset": 0,
    "getNumInstances": 1,
    "getInstanceIndex": 0,
    "getLocalInstanceIndex": 0,
    "isBackendInitialized": False,
}
# The third of four instances, with 4 of 16 IPUs: PopRun's log gives their devices as 24 to 27.
THIRD = InstanceEnvironment(
    num_total_replicas=8,
    num_local_replicas=2,
    num_ipus_per_replica=2,
    replica_index_offset=4,
    local_instance_index=1,
    num_local_instances=2,
)
LAUNCHED = {
    "isPopdistEnvSet": True,
    "getNumTotalReplicas": 8,
    "getNumLocalReplicas": 2,
    "getNumIpusPerReplica": 2,
    "getReplicaIndexOffset": 4,
    "getNumInstances": 4,
    "getInstanceIndex": 2,
    "getLocalInstanceIndex": 1,
    "getDeviceId": 26,
    "isBackendInitialized": False,
}


@pytest.fixture(autouse=True)
def not_yet_initialised():
    """A test that ran before in this process may have used a collective."""
    if popdist.isBackendInitialized():
        popdist.finalizeBackend()


@pytest.fixture
def instance(monkeypatch):
    for name, value in THIRD.to_environ().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("name", ALONE)
def test_alone(name):
    assert getattr(popdist, name)() == ALONE[name]


@pytest.mark.parametrize("name", LAUNCHED)
def test_as_an_instance(instance, name):
    assert getattr(popdist, name)() == LAUNCHED[name]


def test_the_number_of_ipus_is_compared_and_never_raises(instance):
    assert popdist.checkNumIpusPerReplica(2)
    assert not popdist.checkNumIpusPerReplica(1)


def test_uneven_replicas_have_no_instance_index(instance):
    instance.delenv("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE")
    for name in ("getInstanceIndex", "getNumInstances"):
        with pytest.raises(popdist.WireError, match="POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"):
            getattr(popdist, name)()
    assert popdist.getReplicaIndexOffset() == 4


def test_a_lone_program_may_make_the_raw_steps_in_order():
    popdist.registerDefaultBackend()
    popdist.initializeBackend()
    try:
        assert popdist.isBackendInitialized()
        popdist.init()  # a second time is harmless
    finally:
        popdist.finalizeBackend()
    assert not popdist.isBackendInitialized()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "2 processes without poprun"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "Start the program with poprun-py -n 3"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, ""),
        ({}, ""),
    ],
    ids=["Open MPI", "MPICH", "second process", "one process", "no MPI"],
)
def test_processes_that_do_not_know_of_each_other_are_told(variables, says, monkeypatch, caplog):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    popdist.finalizeBackend()
    popdist.init()
    try:
        assert bool(caplog.text) == bool(says)
        assert says in caplog.text
    finally:
        popdist.finalizeBackend()


@pytest.mark.parametrize("arguments", [(0, print), (np.int64(0), print), ({1}, "print")])
def test_instances_and_what_they_run_are_checked_everywhere(arguments):
    with pytest.raises(TypeError, match="expected a set of instance indices"):
        popdist.execute_on_instances(*arguments)


def test_another_backend_is_refused():
    with pytest.raises(popdist.PopdistError, match=r"libother\.so.*MPI"):
        popdist.registerBackend("libother.so")


def test_every_public_name_is_there():
    assert all(getattr(popdist, name) is not None for name in popdist.__all__)


def test_public_modules_are_imported_on_use_and_left_out_of_star_imports():
    program = "import popdist_py; popdist_py.heartbeat; from popdist_py import *; init; heartbeat"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "name 'heartbeat' is not defined" in finished.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'popdist_py' has no attribute 'all_reduce_'"):
        _ = popdist.all_reduce_


def test_dir_lists_every_public_name():
    assert set(popdist.__all__) < set(dir(popdist))
