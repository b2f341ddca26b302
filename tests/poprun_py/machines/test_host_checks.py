"""Probes of hosts: checks of their reports, and real requests through a fake ssh."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from poprun_py.errors import StartError
from poprun_py.machines import host_reports, probe_script
from poprun_py.machines.host_checks import (
    CALLS_BACK,
    HostChecks,
    all_problems,
    checks_of,
    grouped_checks,
    raise_first_problem,
)
from poprun_py.machines.host_list import Host
from poprun_py.machines.host_reports import (
    HostReport,
    cached_reports,
    make_request,
    own_report,
    request_reports,
)
from poprun_py.machines.remote_shell import Problem, Shell
from poprun_py.planning.views.host_tables import check_table

REQUEST = replace(
    make_request((sys.executable, "train.py"), "/mpi/bin/mpirun"), packages=("mpi4py",)
)
GOOD = {
    "time": 0.0, "host": "n0", "python": "3.11.7", "packages": {"mpi4py": "4.1.2"},
    "poprun": "0.1.0", "mpirun": "mpirun (Open MPI) 5.0.11", "program": "ok", "folder": True,
    "networks": [["lo", "127.0.0.1", 8, False], ["eth0", "10.0.0.1", 24, False]],
    "fabric": False, "memory": 8 << 30, "shm": 4 << 30, "files": 65536, "machine": None,
    "called_back": True,
}  # fmt: skip


def answer(name="n0", clock=0.0, **changes):
    return HostReport(host=Host(name=name), facts={**GOOD, **changes}, clock_seconds=clock)


def checks(reports):
    return {name: checks_of(report, GOOD, REQUEST) for name, report in reports.items()}


def problems(given):
    return {c.name: c.problem for c in checks_of(given, GOOD, REQUEST) if c.problem is not None}


def test_a_host_that_equals_this_machine_has_no_problem():
    assert problems(answer()) == {}


@pytest.mark.parametrize(
    ("changes", "cell", "said", "is_vital"),
    [
        ({"python": "3.12.1"}, "Python", "3.12.1 on the host and 3.11.7 on this machine", True),
        ({"mpirun": ""}, "MPI", "is missing on the host", True),
        ({"mpirun": "mpirun (Open MPI) 4.1.6"}, "MPI", "4.1.6", True),
        ({"packages": {"mpi4py": ""}}, "mpi4py", "is missing on the host", True),
        ({"poprun": "0.0.9"}, "poprun-py", "0.0.9 on the host", True),
        ({"program": "missing"}, "program", "train.py is missing", True),
        ({"folder": False}, "folder", "working folder", True),
        ({"clock": 7.5}, "clock", "7.5 s off", False),
        ({"memory": 10 << 20}, "free memory", "10 MiB", False),
        ({"shm": 1 << 20}, "/dev/shm", "1 MiB", False),
        ({"files": 256}, "open files", "256", False),
        (
            {"networks": [["lo", "127.0.0.1", 8, False]]},
            "network",
            "no network other than loopback",
            False,
        ),
        ({"called_back": False}, "calls back", "cannot open a connection", False),
    ],
)
def test_each_difference_is_one_problem_with_a_fix(changes, cell, said, is_vital):
    given = answer(**changes)
    found = problems(given)
    assert list(found) == [cell]
    assert said in found[cell].text
    assert found[cell].fix
    if is_vital:
        with pytest.raises(StartError, match="host n0: "):
            raise_first_problem(checks({"n0": given}))
    else:
        raise_first_problem(checks({"n0": given}))


def test_hosts_with_the_same_problem_are_named_together():
    reports = {f"n{i}": answer(f"n{i}", mpirun="") for i in range(3)}
    reports["n7"] = HostReport(
        host=Host(name="n7"), problem=Problem("the host does not answer", "ping n7")
    )
    with pytest.raises(StartError) as caught:
        raise_first_problem(checks(reports))
    assert str(caught.value).startswith("host n[0-2]: MPI is missing on the host")
    assert "1 other problem" in str(caught.value)


def test_after_a_failed_start_a_missing_connection_is_an_error_and_the_rest_is_reported():
    reports = {
        "n0": answer(called_back=False, clock=7.5), "n1": answer("n1", files=64, clock=7.5),
    }  # fmt: skip
    raise_first_problem(checks(reports))
    with pytest.raises(
        StartError, match=r"^host n0: the host cannot open a connection to this machine"
    ):
        raise_first_problem(checks(reports), also=(CALLS_BACK,))
    del reports["n0"]
    assert all_problems(checks(reports)) == (
        "Host n1: the clock of the host is 7.5 s off; run an NTP client on the host. Host n1: "
        "a process on the host may open at most 64 files; raise the limit with ulimit -n "
        "65536, or with nofile in /etc/security/limits.conf"
    )
    assert all_problems(checks({"n0": answer()})) == ""


def test_hosts_report_the_soft_limit_of_open_files_and_the_launcher_its_hard_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert probe_script.open_files() == soft - 1
        assert own_report(REQUEST).facts["files"] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_table_groups_equal_hosts_and_lists_fixes():
    reports = {f"n{i}": answer(f"n{i}") for i in range(4)}
    reports["n4"] = answer("n4", program="missing")
    reports["n5"] = HostReport(host=Host(name="n5"), problem=Problem("it is off", "switch it on"))
    checked = HostChecks(groups=grouped_checks(checks(reports)), network="Over eth0.")
    assert not checked.has_passed
    table = check_table(checked)
    lines = table.splitlines()
    assert lines[0].split() == ["n[0-3]", "n4", "n5"]
    program = next(line for line in lines if line.startswith("program"))
    assert program == "program        ok      ! missing    ?"
    assert "n5: it is off; switch it on" in lines
    assert lines[-2:] == ["", "Over eth0."]
    coloured = check_table(checked, colour=True)
    assert "\x1b[31m! missing" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured).split() == table.split()
    assert HostChecks(groups=grouped_checks(checks({"n0": answer()}))).has_passed
    assert not replace(checked, groups={}, has_network=False).has_passed


# --- real requests: a fake ssh runs the command on this machine ----------------------------------


@pytest.fixture
def here_by_another_name(tmp_path, monkeypatch):
    """Return a shell that runs the commands for all hosts on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nshift\necho 'Welcome to this machine!'\nexec sh -c \"$*\"\n")
    fake.chmod(0o755)
    return Shell((str(fake),))


def test_a_real_report_passes_the_checks_and_is_cached(here_by_another_name, tmp_path):
    program = tmp_path / "train.py"
    program.write_text("")
    request = make_request((sys.executable, str(program)), str(sys.executable))
    host = Host(name="elsewhere")
    reports = request_reports((host,), here_by_another_name, request)
    assert reports["elsewhere"].problem is None
    ours = own_report(request).facts
    assert [
        c.name for c in checks_of(reports["elsewhere"], ours, request) if c.problem and c.is_vital
    ] == []
    assert reports["elsewhere"].machine.numa_nodes
    assert cached_reports((host,))["elsewhere"].facts == reports["elsewhere"].facts
    json.dumps(ours)


def end_what_is_left(folder):
    """End the processes that ssh left behind, and check that there were some."""
    pids = [int(line) for line in (folder / "left").read_text().split()]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_host_that_hangs_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(host_reports, "_REPORT_SECONDS", 0.5)
    fake = tmp_path / "ssh"
    # As with a ProxyCommand, a child of ssh keeps the output open.
    fake.write_text(f"#!/bin/sh\nsleep 600 & echo $! >> {tmp_path}/left\nwait\n")
    fake.chmod(0o755)
    hosts = (Host(name="n0"), Host(name="n1"))
    reports = request_reports(hosts, Shell((str(fake),)), REQUEST)
    assert all("does not answer" in a.problem.text for a in reports.values())
    end_what_is_left(tmp_path)


def test_the_time_out_grows_with_the_number_of_hosts(tmp_path, monkeypatch):
    # The time-out has no constant part in this test.
    monkeypatch.setattr(host_reports, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(host_reports, "_SECONDS_PER_SSH", 30.0)
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nsleep 0.2\nexit 127\n")
    fake.chmod(0o755)
    hosts = tuple(Host(name=f"n{i}") for i in range(3))
    reports = request_reports(hosts, Shell((str(fake),)), REQUEST)
    assert all("does not run on the host" in a.problem.text for a in reports.values())


def test_a_report_is_read_although_ssh_keeps_a_connection_open(here_by_another_name, tmp_path):
    # As with ControlPersist, a process that ssh leaves behind keeps stderr open.
    fake = Path(here_by_another_name.words[0])
    fake.write_text(
        fake.read_text().replace("shift", f"shift; sleep 600 & echo $! > {tmp_path}/left")
    )
    reports = request_reports((Host(name="n0"),), here_by_another_name, REQUEST)
    assert reports["n0"].problem is None
    end_what_is_left(tmp_path)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("echo 'Identity file k not accessible: No such file or directory' >&2\n"
         "echo 'Permission denied (publickey)' >&2; exit 255", "key file"),
        (f"echo '{probe_script.MARK}{{\"time\": 1.'", "a damaged answer"),
        ("exit 127", "does not run on the host"),
    ],
)  # fmt: skip
def test_an_invalid_or_missing_report_is_explained(ends, said, tmp_path):
    fake = tmp_path / "ssh"
    fake.write_text(f"#!/bin/sh\n{ends}\n")
    fake.chmod(0o755)
    given = request_reports((Host(name="n0"),), Shell((str(fake),)), REQUEST)
    assert said in given["n0"].problem.text


def test_invalid_cached_reports_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "poprun-py" / "hosts"
    folder.mkdir(parents=True)
    (folder / "n0.json").write_text("[1, 2")
    (folder / "n1.json").write_text("[1, 2]")
    (folder / "n3.json").write_text('{"networks": 3}')
    (folder / "n4.json").write_text('{"networks": [["eth0", "10.0.0.999", 24, false]]}')
    hosts = [Host(name=f"n{i}") for i in range(5)]
    assert cached_reports(hosts) == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/cache")
    assert cached_reports(hosts) == {}
