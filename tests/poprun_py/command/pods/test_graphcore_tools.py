"""Tests of gc-info and gc-monitor without a pod."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from support.processes import wait_until
from support.repository import ROOT

from poprun_py.command import cli
from poprun_py.command.click_commands import run
from poprun_py.command.pods import graphcore_tools, partitions_in_use
from poprun_py.command.pods.graphcore_tools import (
    GC_INFO,
    GC_MONITOR,
    device_info,
    device_listing,
    monitor_json,
    monitor_text,
)
from poprun_py.command.pods.partitions_in_use import (
    FoundPartitions,
    IpuProcess,
    machine_partitions,
    partition_of_machine,
)
from poprun_py.running.supervise import launcher_queries

FREE = partition_of_machine("emulated", 16, "HOST")
HELD = replace(
    partition_of_machine(
        "p4", 4, "HOST",
        processes=(
            IpuProcess(pid=100, instance=0, host="HOST", ipus=(0, 1), command="python train.py",
                   user="ann", seconds=13.4),
            # An instance on another host, whose command and user are not known.
            IpuProcess(pid=7, instance=1, host="a-host-with-a-name-of-more-than-30-letters",
                      ipus=(2, 3)),
        ),
    ),
    launcher=90,
)  # fmt: skip


def test_listing_has_the_form_of_graphcores_tool(golden):
    golden("listing_p2.txt", device_listing([partition_of_machine("p1", 2, "HOST")]) + "\n")
    golden("listing_p4_in_use.txt", device_listing([HELD]) + "\n")


@pytest.mark.parametrize(
    ("num_ipus", "first_ids"),
    [(1, [0]), (4, [0, 4, 6]), (16, [0, 16, 24, 28, 30]), (64, [0, 64, 96, 112, 120, 124, 126])],
)
def test_device_ids_are_those_of_poplar(num_ipus, first_ids):
    devices = list(partition_of_machine("p", num_ipus, "HOST").devices())
    assert [device.id for device in devices] == list(range(2 * num_ipus - 1))
    assert [device.id for device in devices if device.ipus.start == 0] == first_ids


def test_monitor_tables(golden):
    golden("monitor.txt", monitor_text([FREE, HELD]) + "\n")
    golden("monitor_no_card_info.txt", monitor_text([FREE, HELD], card_info=False) + "\n")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (75, "1m15s"), (7300, "2h1m"), (None, "N/A")]
)
def test_elapsed_times(seconds, shown):
    holder = IpuProcess(pid=1, instance=0, host="HOST", ipus=(0,), seconds=seconds)
    assert f" {shown} " in monitor_text([partition_of_machine("p", 1, "HOST", (holder,))])


def test_monitor_json_has_every_ipu_and_process():
    partition = monitor_json([HELD])["partitions"][0]
    assert [ipu["pid"] for ipu in partition["ipus"]] == [100, 100, 7, 7]
    assert [(p["pid"], p["ipus"], p["user"]) for p in partition["processes"]] == [
        (100, (0, 1), "ann"), (7, (2, 3), None),
    ]  # fmt: skip
    assert (partition["name"], partition["launcher"]) == ("p4", 90)


def test_device_info_names_the_processes():
    pair = next(device for device in HELD.devices() if device.id == 5)
    text = device_info(HELD, pair)
    assert text.startswith("Device Info:\n  partition: p4\n  device id: 5\n  target: Multi IPU\n")
    assert "IPUs: 2 3\n" in text
    assert text.endswith("in use by: 7 (instance 1)")


def as_read(document):
    return json.loads(json.dumps(document))


@pytest.fixture
def partitions(monkeypatch):
    found = FoundPartitions([FREE, HELD], [55])
    monkeypatch.setattr(graphcore_tools, "find_partitions", lambda _: found)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-l"], "Partition: emulated [active]\n-+- Id: [0]"),
        (["--list-devices"], "Partition: p4 [active]\n"),
        (["--ipu-count"], "16\n"),
        (["-d", "28", "--ipu-count"], "8\n"),
        (["-d", "0", "--ipu-arch"], "ipu2\n"),
        (["--tile-clock-speed"], "1330 MHz\n"),
        (["-i", "-d", "30"], "number of IPUs: 16\n"),
        (["--version"], "poprun-py "),
        (["--help"], "--device-info"),
    ],
)
def test_gc_info(words, shown, partitions, capsys):
    assert run(GC_INFO, words) == 0
    assert shown in capsys.readouterr().out


def test_gc_info_uses_the_partition_of_the_variable(partitions, capsys, monkeypatch):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p4")
    assert run(GC_INFO, ["-i", "-d", "6", "--ipu-count"]) == 0
    shown = capsys.readouterr()
    assert "in use by: 100 (instance 0), 7 (instance 1)\n4\n" in shown.out
    assert "launcher (process 55) does not answer" in shown.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "an option is missing: expected --list-devices"),
        (["-i"], "--device-info needs the option --device-id ID"),
        (["-i", "-d", "31"], "a device of partition emulated, 0 to 30"),
        (["-l", "-d", "31"], "a device of partition emulated, 0 to 30"),
        (["-l", "-i"], "--device-info needs the option"),
        (["-i", "-d", "x"], "'x' is not a valid integer"),
        (["--no-such"], "unknown option --no-such; gc-info --help lists all"),
    ],
)
def test_wrong_usage_of_gc_info_is_one_line(words, says, partitions, capsys):
    assert run(GC_INFO, words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert says in errors[0]


def test_gc_monitor(partitions, capsys):
    assert run(GC_MONITOR, ["--no-card-info"]) == 0
    assert capsys.readouterr().out == monitor_text([FREE, HELD], card_info=False) + "\n"
    assert run(GC_MONITOR, ["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_read(monitor_json([FREE, HELD]))
    assert run(GC_MONITOR, ["more"]) == 2


@pytest.mark.parametrize(("name", "shown"), [(HELD.name, [HELD]), ("another", [FREE, HELD])])
def test_gc_monitor_shows_the_partition_of_the_variable(
    name, shown, partitions, monkeypatch, capsys
):
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", name)
    assert run(GC_MONITOR, ["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_read(monitor_json(shown))


# --- running jobs ---------------------------------------------------------------------------------


@pytest.mark.mpi
def test_a_running_job_holds_the_ipus_of_its_running_instances(poprun, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # only this job's launcher is asked
    program = tmp_path / "hold.sh"
    program.write_text("while [ $RANK = 1 ] || [ ! -e end ]; do sleep 0.01; done")
    job = poprun(
        "--num-instances", 2, "--num-replicas", 6, "--ipus-per-replica", 2, "--oversubscribe",
        "sh", "hold.sh", start=True,
    )  # fmt: skip

    def partition_of_job():
        return next(
            (
                p
                for p in machine_partitions(launcher_queries.running_jobs()).partitions
                if p.launcher == job.pid
            ),
            None,
        )

    def held_by():
        found = partition_of_job()
        return found and [holder.instance for holder in found.processes]

    wait_until(lambda: held_by() == [0, 1])
    partition = partition_of_job()
    assert partition.name == f"job-{job.pid}"
    assert len(partition.ipus) == 16  # 12, rounded to a power of two
    assert [(h.instance, h.ipus) for h in partition.processes] == [
        (0, (0, 1, 2, 3, 4, 5)), (1, (6, 7, 8, 9, 10, 11)),
    ]  # fmt: skip
    for holder in partition.processes:
        assert holder.command == "sh hold.sh"
        assert holder.host == os.uname().nodename
        os.kill(holder.pid, 0)
    assert sorted(partition.processes_by_ipu()) == list(range(12))
    # An instance that has ended holds no IPUs.
    (tmp_path / "end").touch()
    wait_until(lambda: held_by() == [1])
    job.send_signal(signal.SIGINT)
    job.wait(60)
    assert partition_of_job() is None


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("words", "partition"),
    [
        (("--offline-mode", "yes"), None),
        pytest.param(("--vipu-partition", "p-of-test"), "p-of-test", marks=pytest.mark.sweep),
    ],
)
def test_offline_jobs_hold_no_ipus_and_partitions_have_the_name_of_the_option(
    words, partition, poprun, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = poprun("-n", 1, *words, "sleep", "60", start=True)

    def answer():
        return launcher_queries.running_jobs().get(job.pid)

    wait_until(lambda: (answer() or {}).get("instances"))
    assert answer()["num_ipus"] == int(partition is not None)
    names = [
        each.name
        for each in machine_partitions(launcher_queries.running_jobs()).partitions
        if each.launcher == job.pid
    ]
    assert names == ([partition] if partition else [])


def test_launchers_that_do_not_answer_are_returned(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_queries, "_temporary_folders", lambda _: {tmp_path})
    monkeypatch.setattr(launcher_queries, "_HOLDINGS_SECONDS", 0.1)
    silent, gone = tmp_path / "poprun-123-abc", tmp_path / "poprun-124-abc"
    for folder in (silent, gone, tmp_path / "poprun-cache"):
        folder.mkdir()
    (tmp_path / "poprun-cache" / "control").touch()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as closed:
        listener.bind(str(silent / "control"))
        listener.listen()
        closed.bind(str(gone / "control"))
        assert launcher_queries.running_jobs() == {123: None}
        assert machine_partitions(launcher_queries.running_jobs()).silent == [123]


INVALID_ANSWERS = [
    [1],
    {"num_ipus": "x"},
    {"num_ipus": 1},
    {"num_ipus": 1, "instances": [1]},
    {"num_ipus": 10**12, "partition": None, "instances": []},
    {"num_ipus": -(10**12), "partition": None, "instances": []},
    {"num_ipus": float("inf"), "partition": None, "instances": []},
    {"num_ipus": 1, "partition": None,
     "instances": [{"pid": 1, "index": 0, "host": "h", "ipus": ["x"]}]},
]  # fmt: skip


@pytest.mark.parametrize("answer", INVALID_ANSWERS)
def test_a_launcher_with_an_invalid_answer_is_returned(answer):
    # Root queries the launchers of all users, which may have other versions.
    free = partition_of_machine("emulated", 16, os.uname().nodename)
    assert machine_partitions({7: answer}) == FoundPartitions([free], [7])


def test_control_characters_are_not_printed():
    instance = {"pid": 2**30, "index": 0, "host": "a\x1b[2J", "ipus": [0]}
    job = {"num_ipus": 1, "partition": "\x1b[31m\n" + "p" * 150, "instances": [instance]}
    partitions = machine_partitions({5: job}).partitions
    lines = monitor_text(partitions).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "a?[2J" in "".join(lines)
    assert "partition ?[31m?ppp" in "".join(lines)
    assert partitions_in_use._short_command(["/bin/sh", "a\nb\x1b"]) == "sh a?b?"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder")
def test_only_root_queries_launchers_of_other_users(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_queries, "_temporary_folders", lambda _: {tmp_path})
    with socket.socket(socket.AF_UNIX) as listener:
        (tmp_path / "poprun-123-abc").mkdir()
        listener.bind(str(tmp_path / "poprun-123-abc" / "control"))
        assert [pid for pid, _ in launcher_queries._sockets()] == [123]
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        assert list(launcher_queries._sockets()) == []


def test_messages_and_help_have_the_name_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/poprun"])
    assert cli.run(["--num-instances", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "poprun: error: no program is given; expected poprun [options] program [arguments]"
    )
    code = (
        "import sys; sys.argv[0] = '/opt/bin/poprun'; from poprun_py.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.startswith("Usage: poprun [OPTIONS] PROGRAM")
    assert "poprun -n 2 train.py --epochs 3" in done.stdout
    assert "poprun-py" not in done.stdout
    monkeypatch.setenv("_POPRUN_COMPLETE", "zsh_source")
    with pytest.raises(SystemExit):
        cli.main()
    assert "#compdef poprun\n" in capsys.readouterr().out
