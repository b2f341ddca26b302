"""Without a pod, programs that name ids attach to devices of this machine, one at a time."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path
from unittest.mock import patch

import pytest
from poptorch.forked_program import ForkedProgram
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.pods import program_devices
from popdist_py.pods.find_pod import find_pod
from popdist_py.pods.machine_pod import existing_machine
from popdist_py.pods.model.pod_errors import InvalidRequestError, PodError
from poprun_py.command.pods import partitions_in_use


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Return a function that returns the process and IPUs of each holder, as in gc-monitor."""
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path / "pods"))

    def held():
        (partition,) = partitions_in_use.machine_partitions({}).partitions
        assert (partition.name, len(partition.ipus)) == ("emulated", 16)
        return [(holder.pid, holder.ipus) for holder in partition.processes]

    with patch.multiple(program_devices, _pod=None, _machine=None, _was_sought=False):
        yield held
        # Models refer to themselves. They have to be collected while the pod's folder still exists.
        gc.collect()
        if program_devices._machine is not None:
            program_devices._machine.store.close()


def model(ipu_id, replicas=1):
    options = quiet_options().useIpuId(ipu_id).replicationFactor(replicas)
    return poptorch.inferenceModel(Mlp(), options)


def compiled(ipu_id, replicas=1):
    made = model(ipu_id, replicas)
    made.compile(classified(2 * replicas)[0])
    return made


def test_an_id_that_is_used_is_shown_and_given_back(machine):
    kept, pair = compiled(3), compiled(16, replicas=2)
    assert machine() == [(os.getpid(), (3,)), (os.getpid(), (0, 1))]
    pair.destroy()
    kept.detachFromDevice()
    assert machine() == []
    kept.attachToDevice()
    assert machine() == [(os.getpid(), (3,))]


def test_two_models_do_not_have_one_id(machine):
    kept = compiled(3)
    with pytest.raises(poptorch.Error, match=r"Failed to acquire device with id 3: IPU 3 .* holds"):
        compiled(3)
    assert kept.isAttachedToDevice()


@pytest.mark.parametrize(
    ("ipu_id", "replicas", "said"),
    [
        (99, 1, "has no device with the id 99: its devices with 1 IPU have the ids 0 to 15$"),
        (31, 16, "has no device with the id 31: its devices with 16 IPUs have the ids 30 to 30$"),
        (3, 4, "device 3 of .* has 1 IPU, but 4 IPUs are needed: .* ids 24 to 27$"),
        (0, 32, "but 32 IPUs are needed: the partition only has devices with 1, 2, 4, 8, 16 IPUs$"),
    ],
)
def test_ids_are_those_that_gc_info_lists(machine, ipu_id, replicas, said):
    with pytest.raises(poptorch.Error, match=said):
        compiled(ipu_id, replicas)
    assert machine() == []


def test_an_id_can_be_checked_though_it_is_held(machine):
    kept = compiled(3)
    pod = program_devices.machine_of_process()
    pod.check_device(1, 3)
    pod.check_device(3, 24)
    with pytest.raises(InvalidRequestError, match="but 2 IPUs are needed"):
        pod.check_device(2, 3)
    assert kept.isAttachedToDevice()


def test_a_program_that_names_no_id_has_no_limit_and_makes_nothing(machine, tmp_path):
    models = [poptorch.inferenceModel(Mlp(), quiet_options()) for _ in range(17)]
    for each in models:
        each.compile(classified(2)[0])
    assert not (tmp_path / "pods").exists()
    assert machine() == []


def test_other_programs(machine, monkeypatch):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    kept = compiled(5)
    program = ForkedProgram(Path(__file__).with_name("waiting_program.py"), 5)
    try:
        assert "Waiting for an IPU device" in program.stderr.readline()
        kept.detachFromDevice()
        child = int(program.stdout.readline())
        os.kill(child, 9)
        assert machine() == [(program.pid, (5,))]
        monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU")
        with pytest.raises(poptorch.Error, match=rf"\(process {program.pid} of .*\) holds 1"):
            kept.attachToDevice()
    finally:
        program.close()
    # Processes that were killed hold no devices.
    kept.attachToDevice()
    assert machine() == [(os.getpid(), (5,))]


def test_it_is_no_pod_that_somebody_configured(machine, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p16")
    kept = compiled(0)
    assert find_pod(None, os.environ) is None
    assert machine() == [(os.getpid(), (0,))]
    monkeypatch.setenv("POPRUN_POD", "none")
    with pytest.raises(poptorch.Error, match="holds 1"):
        compiled(0)
    assert kept.isAttachedToDevice()
    assert poptorch.ipuHardwareIsAvailable(64)


def test_a_second_program_finds_the_partition_of_the_first(machine):
    first, second = program_devices.machine_of_process(), None
    with patch.object(program_devices, "_machine", None):
        second = program_devices.machine_of_process()
    try:
        assert first.partition().ipus == second.partition().ipus
        assert existing_machine({}) is None or machine() == []
    finally:
        second.store.close()


def test_a_folder_that_cannot_be_written(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch(stat.S_IRUSR)
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path / "file"))
    with pytest.raises(poptorch.Error, match=r"id 3: .* cannot be written: .*: set POPRUN_PODS to"):
        compiled(3)
    with pytest.raises(PodError, match="or do not select a device"):
        program_devices.machine_of_process()
    assert machine() == []
