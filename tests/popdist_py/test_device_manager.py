"""popart.DeviceManager with the devices of a pod, of an instance, and of an ordinary process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from support.program_pods import configuring, held, partition
from support.repository import ROOT

from popdist_py import popart, popdist_functions
from popdist_py.pods import program_devices
from popdist_py.pods.model.pod_errors import UnreachableError

Kind = popart.DeviceConnectionType


@pytest.fixture
def pod(tmp_path, monkeypatch):
    with configuring(tmp_path / "pods", monkeypatch) as configure:
        yield configure(partition("p4", size=4))


@pytest.fixture
def manager():
    return popart.DeviceManager()


def test_the_devices_of_the_partition(pod, manager):
    found = {n: [each.id for each in manager.enumerateDevices(numIpus=n)] for n in (1, 2, 3, 4, 8)}
    assert found == {1: [0, 1, 2, 3], 2: [4, 5], 3: [], 4: [6], 8: []}
    assert manager.enumerateDevices(deviceType=popart.DeviceType.Cpu) == []
    assert held(pod) == []


def test_always_attaches_at_once(pod, manager):
    first, second = manager.acquireAvailableDevice(2), manager.acquireAvailableDevice(2)
    assert [(each.id, each.numIpus, each.isAttached) for each in (first, second)] == [
        (4, 2, True),
        (5, 2, True),
    ]
    assert held(pod) == [(0, 1), (2, 3)]
    assert manager.tryAcquireAvailableDevice(1) is None
    with pytest.raises(
        popart.popart_exception,
        match=r"1 IPU\(s\): processes hold all 4 devices .*: call detach\(\) on a",
    ):
        manager.acquireAvailableDevice()
    with pytest.raises(popart.popart_exception, match=r"8 IPU\(s\): no device has this size"):
        manager.acquireAvailableDevice(8)
    first.detach()
    first.detach()
    assert (first.isAttached, held(pod)) == (False, [(2, 3)])
    assert first.attach()
    assert first.attach()
    assert held(pod) == [(2, 3), (0, 1)]


def test_by_id(pod, manager):
    assert manager.acquireDeviceById(5).numIpus == 2
    assert held(pod) == [(2, 3)]
    assert manager.tryAcquireDeviceById(3) is None
    with pytest.raises(
        popart.popart_exception, match=r"id 6: a process holds the device, .*, or wait for an"
    ):
        manager.acquireDeviceById(6)
    with pytest.raises(
        popart.popart_exception,
        match=r"id 7: .*: 0 to 3 \(1 IPU each\), 4 to 5 \(2 IPUs each\), 6 to 6 \(4 IPUs each\)",
    ):
        manager.acquireDeviceById(7)


def test_on_demand_attaches_when_asked(pod, manager):
    first = manager.acquireAvailableDevice(2)
    later = manager.acquireAvailableDevice(2, connectionType=Kind.OnDemand)
    same = manager.acquireDeviceById(4, connectionType=Kind.OnDemand)
    assert (later.id, later.isAttached, held(pod)) == (5, False, [(0, 1)])
    assert later.attach()
    assert not same.attach()
    first.detach()
    assert same.attach()


def test_on_demand_waits_as_long_as_the_time_out_says(pod, manager, monkeypatch):
    sleeps, sleep = threading.Event(), time.sleep
    monkeypatch.setattr(program_devices, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(
        program_devices.time, "sleep", lambda seconds: (sleeps.set(), sleep(seconds))
    )
    first = manager.acquireDeviceById(6)
    manager.setOnDemandAttachTimeout(30)
    other = manager.acquireDeviceById(0, connectionType=Kind.OnDemand)
    assert other.getOnDemandAttachTimeout() == 30
    waiting = threading.Thread(target=other.attach)
    waiting.start()
    assert sleeps.wait(30)
    first.detach()
    waiting.join()
    assert other.isAttached
    first.setOnDemandAttachTimeout(0.02)
    assert not first.attach()
    for wrong in (-1, float("nan"), "soon"):
        with pytest.raises(ValueError, match="expected a number of seconds of at least 0"):
            manager.setOnDemandAttachTimeout(wrong)


def test_what_never_attaches(pod, manager):
    for each in (
        manager.acquireAvailableDevice(4, connectionType=Kind.Never),
        manager.createOfflineIPUDevice(),
    ):
        with pytest.raises(popart.popart_exception, match="connection type is Never"):
            each.attach()
    for each in (manager.createCpuDevice(), manager.createIpuModelDevice({"numIPUs": 1})):
        assert each.attach()
    assert held(pod) == []


def test_a_device_taken_at_random(pod, manager):
    random = popart.DeviceSelectionCriterion.Random
    taken = {manager.acquireAvailableDevice(selectionCriterion=random).id for _ in range(4)}
    assert taken == {0, 1, 2, 3}


def test_a_pod_that_cannot_be_asked(pod, manager, monkeypatch):
    def gone(*_, **__):
        raise UnreachableError("http://there:8090 does not answer")

    device = manager.acquireAvailableDevice()
    for name in ("partitions", "attach", "detach"):
        monkeypatch.setattr(program_devices._pod.store, name, gone)
    for act in (device.detach, manager.acquireAvailableDevice, device.attach):
        with pytest.raises(popart.popart_exception, match="http://there:8090 does not answer"):
            act()


def test_without_a_pod_devices_do_not_run_out(pod, monkeypatch, manager):
    monkeypatch.setenv("POPRUN_POD", "none")
    first, second = manager.acquireDeviceById(126), manager.acquireAvailableDevice(64)
    assert (first.numIpus, second.id) == (64, 126)
    assert first.isAttached
    assert second.isAttached
    assert manager.acquireAvailableDevice(1, connectionType=Kind.OnDemand).attach()


def test_the_launcher_holds_those_of_an_instance(pod, monkeypatch, manager):
    for name, value in {
        "POPDIST_NUM_TOTAL_REPLICAS": "4",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_NUM_LOCAL_REPLICAS": "2",
        "POPDIST_REPLICA_INDEX_OFFSET": "2",
    }.items():
        monkeypatch.setenv(name, value)
    found = {n: [each.id for each in manager.enumerateDevices(numIpus=n)] for n in (1, 2, 4)}
    assert found == {1: [2, 3], 2: [5], 4: []}
    assert popdist_functions.getDeviceId() == 5
    assert manager.acquireDeviceById(5).isAttached
    assert manager.tryAcquireAvailableDevice(4) is None
    assert held(pod) == []


def test_a_program_that_is_killed_has_nothing_at_once(pod, manager, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = (
        "import sys; from popdist_py import popart; "
        "print(popart.DeviceManager().acquireAvailableDevice(4).id, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as other:
        assert other.stdout.readline() == "6\n"
        assert manager.tryAcquireAvailableDevice() is None
        other.kill()
        other.wait()
        assert manager.tryAcquireAvailableDevice(4) is not None
    assert held(pod) == [(0, 1, 2, 3)]


def test_a_program_without_torch(tmp_path):
    program = (
        "import sys; from popdist_py import popart; popart.DeviceManager().enumerateDevices(); "
        "print({'torch', 'numpy', 'sqlite3', 'urllib3'} & set(sys.modules))"
    )
    environ = {"PYTHONPATH": str(ROOT), "POPRUN_PODS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
