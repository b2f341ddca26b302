"""A model of a program that no launcher started has its device of the pod to itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from poptorch.forked_program import ForkedProgram
from support.models import Mlp, classified, quiet_options
from support.processes import wait_until
from support.program_pods import configuring, held, partition
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.pods import program_devices
from popdist_py.pods.model.pod_errors import UnreachableError
from popdist_py.poptorch.enums import ConnectionType


@pytest.fixture
def configured(tmp_path, monkeypatch):
    with configuring(tmp_path / "pods", monkeypatch) as configure:
        yield configure


@pytest.fixture
def pod(configured):
    return configured(partition())


def model(options=None):
    return poptorch.inferenceModel(Mlp(), options or quiet_options())


def compiled(options=None):
    made = model(options)
    made.compile(classified(2)[0])
    return made


def on_ipus(count):
    def forward(x):
        for ipu in range(count):
            with poptorch.Block(str(ipu), ipu_id=ipu):
                x = x + 1
        return x

    return forward


class Counting(nn.Module):
    """A model that is refused after it is known how many IPUs it needs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class TestWhatIsHeld:
    def test_until_it_is_given_back(self, pod):
        first, second = compiled(), compiled()
        assert held(pod) == [(0,), (1,)]
        (one, _) = pod.attachments()
        assert (one.holder.pid, one.holder.user, one.partition) == (os.getpid(), pod.user, "p16")
        first.detachFromDevice()
        second.destroy()
        assert held(pod) == []
        first.attachToDevice()
        assert held(pod) == [(0,)]
        first.detachFromDevice()
        first(classified(2)[0])
        assert held(pod) == [(0,)]

    def test_a_model_that_is_dropped_holds_nothing(self, pod):
        compiled(quiet_options().useIpuId(0))
        kept = compiled(quiet_options().useIpuId(0))
        assert held(pod) == [(0,)]
        assert kept.isAttachedToDevice()

    @pytest.mark.parametrize(
        ("ipus", "replicas", "taken"), [(1, 1, 1), (2, 2, 4), (2, 3, 8), (3, 2, 8)]
    )
    def test_as_many_ipus_as_all_replicas_need(self, pod, ipus, replicas, taken):
        options = quiet_options().deviceIterations(ipus).autoRoundNumIPUs()
        options.replicationFactor(replicas)
        kept = poptorch.inferenceModel(on_ipus(ipus), options)
        kept.compile(torch.ones(ipus * replicas))
        assert held(pod) == [tuple(range(taken))]

    def test_a_compilation_that_fails_gives_it_back(self, pod):
        options = quiet_options().replicationFactor(2)
        counting = poptorch.inferenceModel(Counting(), options)
        with pytest.raises(poptorch.Error, match="Buffer broadcasting is unsupported"):
            counting.compile(torch.ones(2))
        assert held(pod) == []
        assert not counting.isAttachedToDevice()

    def test_a_forked_child_neither_gives_it_back_nor_has_it(self, pod):
        kept = compiled()
        child = os.fork()
        if not child:
            kept.destroy()
            found = [held(pod) == [(0,)], program_devices._pod is None]
            os._exit(0 if all(found) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert held(pod) == [(0,)]


class TestConnectionTypes:
    def test_always_needs_it_before_it_compiles(self, pod):
        kept = compiled(quiet_options().useIpuId(0))
        other = model(quiet_options().useIpuId(0))
        with pytest.raises(poptorch.Error, match=r"Failed to acquire device with id 0: .* holds 1"):
            other.compile(classified(2)[0])
        assert (other.isCompiled(), other.isAttachedToDevice()) == (False, False)
        kept.detachFromDevice()
        other.compile(classified(2)[0])
        assert other.isAttachedToDevice()

    def test_on_demand_needs_it_when_the_executable_is_ready(self, pod):
        options = quiet_options().useIpuId(0).connectionType(ConnectionType.OnDemand)
        kept, other = compiled(options), model(options)
        with pytest.raises(poptorch.Error, match=r"detachFromDevice\(\).*POPTORCH_WAIT_FOR_IPU=1"):
            other.compile(classified(2)[0])
        assert (other.isCompiled(), other.isAttachedToDevice()) == (True, False)
        kept.destroy()
        other(classified(2)[0])
        assert held(pod) == [(0,)]

    @pytest.mark.parametrize(
        "needs_none",
        [
            lambda o: o.connectionType(ConnectionType.Never),
            lambda o: o.useOfflineIpuTarget(),
            lambda o: o.useIpuModel(True),
        ],
    )
    def test_what_needs_no_device(self, pod, needs_none):
        made = compiled(needs_none(quiet_options()))
        assert made.isCompiled()
        assert held(pod) == []

    def test_the_variable_of_the_ipu_model(self, pod, monkeypatch):
        monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
        compiled()
        assert held(pod) == []
        kept = compiled(quiet_options().useIpuModel(False))
        assert held(pod) == [(0,)]
        assert kept.isAttachedToDevice()

    def test_the_launcher_holds_the_ipus_of_its_instances(self, pod, monkeypatch):
        monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "1")
        monkeypatch.setenv("POPDIST_NUM_LOCAL_REPLICAS", "1")
        monkeypatch.setenv("POPDIST_REPLICA_INDEX_OFFSET", "0")
        assert compiled().isAttachedToDevice()
        assert held(pod) == []


class TestIds:
    def test_exactly_this_device(self, pod):
        kept = compiled(quiet_options().useIpuId(5))
        assert held(pod) == [(5,)]
        kept.destroy()
        kept = model(quiet_options().replicationFactor(4).useIpuId(27))
        kept.compile(classified(4)[0])
        assert held(pod) == [(12, 13, 14, 15)]

    @pytest.mark.parametrize(
        ("replicas", "ipu_id", "said"),
        [
            (1, 31, "no device with the id 31: its devices with 1 IPU have the ids 0 to 15"),
            (1, -1, "no device with the id -1: its devices with 1 IPU have the ids 0 to 15"),
            (1, 24, "device 24 of partition p16 has 4 IPUs, but 1 IPU is needed: .* 0 to 15"),
            (3, 15, "device 15 of partition p16 has 1 IPU, but 4 IPUs are needed: .* 24 to 27"),
            (32, 0, "device 0 of partition p16 has 1 IPU, but 32 IPUs are needed: the partition "
             "only has devices with 1, 2, 4, 8, 16 IPUs"),
        ],
    )  # fmt: skip
    def test_others(self, pod, replicas, ipu_id, said):
        other = model(quiet_options().replicationFactor(replicas).useIpuId(ipu_id))
        with pytest.raises(poptorch.Error, match=said):
            other.compile(classified(replicas)[0])
        assert held(pod) == []


class TestWaiting:
    def test_until_it_is_free(self, pod, monkeypatch, caplog):
        monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
        monkeypatch.setattr(program_devices, "_POLL_SECONDS", 0.01)
        kept = compiled(quiet_options().useIpuId(2))
        other = model(quiet_options().useIpuId(2))
        waiting = threading.Thread(target=other.compile, args=(classified(2)[0],))
        waiting.start()
        wait_until(lambda: "Waiting for an IPU device" in caplog.text)
        assert other.isCompiled()
        kept.detachFromDevice()
        waiting.join()
        assert other.isAttachedToDevice()
        assert caplog.text.count("Waiting") == 1

    def test_an_interrupt_ends_it(self, pod, monkeypatch):
        def interrupt(_):
            raise KeyboardInterrupt

        monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
        monkeypatch.setattr(program_devices.time, "sleep", interrupt)
        kept = compiled(quiet_options().useIpuId(2))
        other = model(quiet_options().useIpuId(2))
        with pytest.raises(KeyboardInterrupt):
            other.compile(classified(2)[0])
        assert (kept.isAttachedToDevice(), other.isAttachedToDevice()) == (True, False)


class TestWhichPartition:
    def test_the_one_that_is_named(self, configured, monkeypatch):
        pod = configured(partition("small", 4), partition("large", 8))
        monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "large")
        kept = compiled()
        assert pod.attachments()[0].partition == "large"
        assert kept.isAttachedToDevice()

    @pytest.mark.parametrize(
        ("partitions", "name", "said"),
        [
            ((), "", "has no partition: make a partition with poprun-py-pod create partition"),
            (("a", "b"), "", r"several partitions \(a, b\): set IPUOF_VIPU_API_PARTITION_ID"),
            (
                ("a", "b"),
                "c",
                r"no partition 'c' in pod .* \(IPUOF_VIPU_API_PARTITION_ID\); existing.*: a, b",
            ),
        ],
    )
    def test_no_such_partition(self, configured, monkeypatch, caplog, partitions, name, said):
        configured(*(partition(each, 4) for each in partitions))
        monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", name)
        with pytest.raises(poptorch.Error, match=f"Failed to acquire a device: .*{said}"):
            compiled()
        assert not poptorch.ipuHardwareIsAvailable()
        assert "No IPU is available" in caplog.text
        with pytest.raises(AssertionError, match="No IPU is available"):
            poptorch.ipuHardwareVersion()

    def test_one_graph_compilation_domain(self, configured, monkeypatch):
        pod = configured(partition(num_gcds=4))
        monkeypatch.setenv("IPUOF_VIPU_API_GCD_ID", "2")
        kept = [compiled() for _ in range(4)]
        assert held(pod) == [(8,), (9,), (10,), (11,)]
        with pytest.raises(poptorch.Error, match="Failed to acquire"):
            compiled()
        assert not poptorch.ipuHardwareIsAvailable(8)
        monkeypatch.setenv("IPUOF_VIPU_API_GCD_ID", "4")
        with pytest.raises(poptorch.Error, match="a GCD of partition p16, 0 to 3"):
            compiled()
        assert len(kept) == 4

    def test_a_pod_that_cannot_be_asked(self, pod, caplog, monkeypatch):
        def gone(*_, **__):
            raise UnreachableError("http://there:8090 does not answer")

        kept = compiled()
        for name in ("partitions", "attach", "detach"):
            monkeypatch.setattr(program_devices._pod.store, name, gone)
        with pytest.raises(poptorch.Error, match="there:8090 does not answer"):
            compiled()
        kept(classified(2)[0])
        kept.detachFromDevice()
        assert "the pod will free the device later: http://there" in caplog.text

    @pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan"])
    def test_a_wrong_time_limit(self, pod, monkeypatch, given):
        monkeypatch.setenv("IPUOF_VIPU_API_TIMEOUT", given)
        with pytest.raises(
            poptorch.Error, match="expected a number of seconds above 0, such as 120"
        ):
            compiled()


class TestHardware:
    def test_what_the_partition_has(self, configured):
        configured(partition("p8", size=8, num_ilds=2), system="POD128")
        kept = compiled()
        found = [n for n in range(-1, 20) if poptorch.ipuHardwareIsAvailable(n)]
        assert found == [1, 2, 4]
        assert poptorch.ipuHardwareVersion() == 2
        assert kept.isAttachedToDevice()
        options = quiet_options().replicationFactor(8)
        with pytest.raises(poptorch.Error, match="p8 only has devices with 1, 2, 4 IPUs"):
            model(options).compile(classified(8)[0])

    def test_a_partition_that_cannot_be_used(self, configured):
        pod = configured(partition())
        assert poptorch.ipuHardwareIsAvailable()
        pod.fail_partition("p16", "a link is broken")
        assert not poptorch.ipuHardwareIsAvailable()
        with pytest.raises(poptorch.Error, match="a link is broken"):
            compiled()

    @pytest.mark.parametrize(
        ("where", "found"), [("/pods/a", [1, 2, 4, 8]), ("none", list(range(1, 65)))]
    )
    def test_what_the_launcher_gave(self, monkeypatch, where, found):
        for name, value in {
            "POPRUN_POD": where,
            "POPDIST_NUM_TOTAL_REPLICAS": "6",
            "POPDIST_NUM_LOCAL_REPLICAS": "3",
            "POPDIST_NUM_IPUS_PER_REPLICA": "2",
            "POPDIST_REPLICA_INDEX_OFFSET": "3",
        }.items():
            monkeypatch.setenv(name, value)
        assert [n for n in range(-1, 70) if poptorch.ipuHardwareIsAvailable(n)] == found


class TestOtherPrograms:
    @pytest.fixture
    def start(self, monkeypatch):
        """Give a function that starts a program which attaches to a device, and waits for it."""
        monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
        with contextlib.ExitStack() as programs:

            def started(ipu_id):
                program = ForkedProgram(Path(__file__).with_name("waiting_program.py"), ipu_id)
                programs.callback(program.close)
                return program

            yield started

    def test_they_exclude_one_another_and_the_dead_hold_nothing(self, pod, start, monkeypatch):
        kept = compiled(quiet_options().useIpuId(0))
        waiting = start(0)
        assert "Waiting for an IPU device" in waiting.stderr.readline()
        kept.detachFromDevice()
        child = int(waiting.stdout.readline())
        try:
            monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU")
            said = rf"waiting_program.py \(process {waiting.pid} of .*\) holds 1"
            with pytest.raises(poptorch.Error, match=said):
                kept.attachToDevice()
            assert not kept.isAttachedToDevice()
            waiting.kill()
            # Its child lives, and holds nothing.
            kept.attachToDevice()
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
        assert held(pod) == [(0,)]

    def test_an_interrupt_ends_one_that_waits(self, pod, start):
        kept = compiled(quiet_options().useIpuId(0))
        waiting = start(0)
        assert "Waiting for an IPU device" in waiting.stderr.readline()
        os.kill(waiting.pid, signal.SIGINT)
        assert waiting.wait() == 1
        assert "KeyboardInterrupt" in waiting.stderr.read()
        assert kept.isAttachedToDevice()
        assert held(pod) == [(0,)]
