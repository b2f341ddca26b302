"""Tests of gc-info and gc-monitor with a configured pod."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace

import pytest

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest
from poprun_py.command.click_commands import run
from poprun_py.command.pods import partitions_in_use
from poprun_py.command.pods.graphcore_tools import GC_INFO, GC_MONITOR

HERE = os.uname().nodename
ANN = Holder(host="h0", pid=4711, user="ann", program="train.py")
JOB = {
    "num_ipus": 2,
    "partition": "p4",
    "instances": [
        {"pid": 2**30, "index": 0, "host": "h0", "ipus": [0]},
        {"pid": 2**30 + 1, "index": 1, "host": "h1", "ipus": [1]},
    ],
}


@pytest.fixture
def jobs(monkeypatch):
    """Return the answers of launchers by process id; a test adds jobs to it."""
    running = {}
    monkeypatch.setattr(partitions_in_use, "running_jobs", lambda: running)
    return running


@pytest.fixture
def pod(tmp_path, monkeypatch, jobs):
    """Make a POD16 of four hosts with one partition of this user and one of bob."""
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path / "pods"))
    known = replace(system_pod("POD16", "lab", ("h0", "h1", "h2", "h3")), reset_seconds=3600.0)
    with contextlib.closing(FolderStore(make_pod(tmp_path / "pods", known))) as store:
        store.create_partition(PartitionRequest(name="p8", size=8))
        store.with_user("bob").create_partition(
            PartitionRequest(name="theirs", size=4, reconfigurable=True)
        )
        yield store


@pytest.fixture
def show(capsys):
    """Return a function that runs a command and returns its exit code and output."""

    def call(command, *words):
        code = run(command, list(words))
        shown = capsys.readouterr()
        return code, re.sub(r" {4}\d+s {4}", "    Ns    ", shown.out), shown.err

    return call


def test_own_and_all_partitions(pod, show, golden):
    pod.attach("p8", 2, ANN)
    code, listed, _ = show(GC_INFO, "-l")
    golden("pod_listing.txt", listed)
    code, every, said = show(GC_INFO, "-l", "--all-partitions")
    assert (code, said) == (0, "")
    assert every.startswith(listed.rstrip("\n"))
    assert "Partition: theirs [active]\n" in every
    code, tables, _ = show(GC_MONITOR, "--all-partitions")
    golden("pod_monitor.txt", tables)


def test_the_variable_selects_the_partition(pod, show, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "theirs")
    code, shown, _ = show(GC_INFO, "-l")
    assert re.findall("^Partition: .*", shown, re.M) == ["Partition: theirs [active]"]
    assert show(GC_INFO, "--ipu-count") == (0, "4\n", "")
    assert show(GC_INFO, "-d", "6", "--ipu-count") == (0, "4\n", "")
    _, shown, _ = show(GC_MONITOR, "--json")
    assert [each["name"] for each in json.loads(shown)["partitions"]] == ["theirs"]
    _, shown, _ = show(GC_INFO, "-l", "--all-partitions")
    names = re.findall("^Partition: (.*) ", shown, re.M)
    assert names == ["theirs", "p8"]
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "zz")
    code, shown, said = show(GC_INFO, "-l")
    assert (code, shown, said.count("\n")) == (2, "", 1)
    assert "IPUOF_VIPU_API_PARTITION_ID=zz" in said
    assert "p8, theirs" in said


def test_states_of_partitions(pod, show):
    pod.reset_partition("p8")
    assert "Partition: p8 [pending]\n" in show(GC_INFO, "-l")[1]
    pod.fail_partition("p8", "a link is down")
    assert "Partition: p8 [error] has 8 IPUs" in show(GC_MONITOR)[1]


def test_no_device_is_in_two_domains(tmp_path, monkeypatch, jobs, show):
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path))
    folder = make_pod(tmp_path, system_pod("POD128", "big", ("h0", "h1")))
    with contextlib.closing(FolderStore(folder)) as store:
        store.create_partition(PartitionRequest(name="p128", size=128, num_ilds=2))
    _, shown, _ = show(GC_INFO, "-l")
    ids = [int(each) for each in re.findall(r"^-\+- Id: \[(\d+)\]", shown, re.M)]
    assert ids == list(range(254))  # and not 254, which would be both racks
    assert "IPU-M host: [h1]" in shown
    code, shown, said = show(GC_INFO, "-d", "254", "-i")
    assert (code, shown) == (2, "")
    assert "a device of partition p128, 0 to 253" in said


def test_instances_of_a_job_are_shown_with_their_ipus(pod, show, jobs):
    launcher = Holder(host=HERE, pid=2**29, user="ann", program="train.py", run_id="r")
    pod.attach("p8", 4, ANN)
    pod.attach("p8", 2, launcher)
    jobs[launcher.pid] = JOB
    _, shown, _ = show(GC_MONITOR, "--json")
    (partition,) = json.loads(shown)["partitions"]
    assert [(each["pid"], each["instance"], each["ipus"]) for each in partition["processes"]] == [
        (4711, None, [0, 1, 2, 3]), (2**30, 0, [4]), (2**30 + 1, 1, [5]),
    ]  # fmt: skip
    assert [ipu["host"] for ipu in partition["ipus"]] == ["h0"] * 4 + ["h1"] * 4
    assert "in use by: 4711 (train.py)\n" in f"{show(GC_INFO, '-i', '-d', '0')[1]}"
    jobs[launcher.pid] = None  # if the launcher does not answer, it is shown as the holder
    _, shown, said = show(GC_MONITOR, "--json")
    processes = json.loads(shown)["partitions"][0]["processes"]
    assert [each["pid"] for each in processes] == [4711, launcher.pid]
    assert "does not answer" in said


def test_jobs_without_the_pod_are_shown_after_its_partitions(pod, show, jobs):
    jobs[55] = {**JOB, "partition": None}
    _, shown, _ = show(GC_INFO, "-l")
    names = re.findall("^Partition: (.*) ", shown, re.M)
    assert names == ["p8", "job-55"]
    code, shown, said = show(GC_INFO, "--ipu-count")
    assert (code, shown) == (2, "")
    assert "set IPUOF_VIPU_API_PARTITION_ID to the name of one partition" in said


def test_each_launcher_is_asked_once(pod, show, monkeypatch):
    calls = []
    monkeypatch.setattr(partitions_in_use, "running_jobs", lambda: calls.append(1) or {55: None})
    assert "launcher (process 55) does not answer" in show(GC_INFO, "-l")[2]
    assert calls == [1]


def test_a_pod_without_partitions(tmp_path, monkeypatch, jobs, show):
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path))
    make_pod(tmp_path, system_pod("POD4", "empty"))
    code, shown, said = show(GC_INFO, "-l")
    assert (code, shown) == (0, "Graphcore device listing:\n")
    assert "you have no partition in the pod" in said
    assert show(GC_MONITOR)[1] == ""
    assert show(GC_MONITOR, "--json")[1] == '{\n  "partitions": []\n}\n'
    assert show(GC_INFO, "-i", "-d", "0")[0] == 2


def test_a_pod_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch, show):
    monkeypatch.setenv("POPRUN_POD", str(tmp_path / "nowhere"))
    for command in (GC_INFO, GC_MONITOR):
        code, shown, said = show(command, *(["-l"] if command is GC_INFO else []))
        assert (code, shown, said.count("\n")) == (3, "", 1)
        assert "nowhere" in said


def test_the_value_none_switches_the_pod_off(pod, show, monkeypatch):
    monkeypatch.setenv("POPRUN_POD", "none")
    assert "Partition: emulated [active]\n" in show(GC_INFO, "-l", "--all-partitions")[1]
