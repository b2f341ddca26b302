"""What is decided from the answers of hosts, and the questions to a real Python."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from poprun_py.errors import StartError
from poprun_py.hosts import host_probe, preflight
from poprun_py.hosts.host_list import Host
from poprun_py.hosts.preflight import Answer, ask, cells, check_table, question, require
from poprun_py.hosts.remote_shell import Problem, Shell

ASKED = {**question((sys.executable, "train.py"), "/mpi/bin/mpirun"), "packages": ["mpi4py"]}
GOOD = {
    "time": 0.0, "host": "n0", "python": "3.11.7", "packages": {"mpi4py": "4.1.2"},
    "poprun": "0.1.0", "mpirun": "mpirun (Open MPI) 5.0.11", "program": "ok", "folder": True,
    "networks": [["lo", "127.0.0.1", 8, False], ["eth0", "10.0.0.1", 24, False]],
    "fabric": False, "memory": 8 << 30, "shm": 4 << 30, "files": 65536, "machine": None,
    "called_back": True,
}  # fmt: skip


def answer(name="n0", clock=0.0, **changes):
    return Answer(host=Host(name=name), report={**GOOD, **changes}, clock_seconds=clock)


def problems(given):
    return {c.name: c.problem for c in cells(given, GOOD, ASKED) if c.problem is not None}


def test_a_host_like_this_one_has_no_problem():
    assert problems(answer()) == {}


@pytest.mark.parametrize(
    ("changes", "cell", "said", "is_vital"),
    [
        ({"python": "3.12.1"}, "Python", "3.12.1 there and 3.11.7 here", True),
        ({"mpirun": ""}, "MPI", "missing there", True),
        ({"mpirun": "mpirun (Open MPI) 4.1.6"}, "MPI", "4.1.6", True),
        ({"packages": {"mpi4py": ""}}, "mpi4py", "missing there", True),
        ({"poprun": "0.0.9"}, "poprun-py", "0.0.9 there", True),
        ({"program": "missing"}, "program", "train.py is missing", True),
        ({"folder": False}, "folder", "working folder", True),
        ({"clock": 7.5}, "clock", "7.5 s off", False),
        ({"memory": 10 << 20}, "free memory", "10 MiB", False),
        ({"shm": 1 << 20}, "/dev/shm", "1 MiB", False),
        ({"files": 256}, "open files", "256", False),
        ({"networks": [["lo", "127.0.0.1", 8, False]]}, "network", "no IPv4 network", False),
        ({"called_back": False}, "calls back", "cannot open a connection", False),
    ],
)
def test_each_difference_is_one_red_cell_with_a_fix(changes, cell, said, is_vital):
    given = answer(**changes)
    found = problems(given)
    assert list(found) == [cell]
    assert said in found[cell].text
    assert found[cell].fix
    if is_vital:
        with pytest.raises(StartError, match="host n0: "):
            require({"n0": given}, GOOD, ASKED)
    else:
        require({"n0": given}, GOOD, ASKED)


def test_hosts_with_the_same_problem_are_named_together():
    answers = {f"n{i}": answer(f"n{i}", mpirun="") for i in range(3)}
    answers["n7"] = Answer(host=Host(name="n7"), problem=Problem("it does not answer", "ping n7"))
    with pytest.raises(StartError) as caught:
        require(answers, GOOD, ASKED)
    assert str(caught.value).startswith("host n[0-2]: MPI is missing there")
    assert "1 other problem" in str(caught.value)


def test_the_table_groups_equal_hosts_and_lists_fixes():
    answers = {f"n{i}": answer(f"n{i}") for i in range(4)}
    answers["n4"] = answer("n4", program="missing")
    answers["n5"] = Answer(host=Host(name="n5"), problem=Problem("it is off", "switch it on"))
    table, is_well = check_table(answers, GOOD, ASKED, mark=lambda text: f"<{text}>")
    assert not is_well
    lines = table.splitlines()
    assert lines[0].split() == ["n[0-3]", "n4", "n5"]
    program = next(line for line in lines if line.startswith("program"))
    assert "! <missing" in program
    assert "n5: it is off; switch it on" in lines
    assert check_table({"n0": answer()}, GOOD, ASKED)[1]


# --- real questions, without any network: "ssh" runs the command here ---------------------------


@pytest.fixture
def here_by_another_name(tmp_path, monkeypatch):
    """A shell whose hosts are all this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nshift\necho 'Welcome to this machine!'\nexec sh -c \"$*\"\n")
    fake.chmod(0o755)
    return Shell((str(fake),))


def test_a_real_answer_passes_and_is_remembered(here_by_another_name, tmp_path):
    program = tmp_path / "train.py"
    program.write_text("")
    asked = question((sys.executable, str(program)), str(sys.executable))
    host = Host(name="elsewhere")
    answers = ask((host,), here_by_another_name, asked)
    assert answers["elsewhere"].problem is None
    ours = host_probe.report(asked)
    assert [
        c.name for c in cells(answers["elsewhere"], ours, asked) if c.problem and c.is_vital
    ] == []
    assert answers["elsewhere"].report["machine"]["numa_nodes"]
    assert preflight.cached((host,))["elsewhere"].report == answers["elsewhere"].report
    json.dumps(ours)


def end_what_is_left(folder):
    for line in (folder / "left").read_text().split():
        os.kill(int(line), signal.SIGKILL)


def test_a_host_that_hangs_is_given_up(tmp_path):
    fake = tmp_path / "ssh"
    # As with a ProxyCommand, another process of it keeps what it writes to open.
    fake.write_text(f"#!/bin/sh\nsleep 30 & echo $! >> {tmp_path}/left\nwait\n")
    fake.chmod(0o755)
    begun = time.monotonic()
    hosts = (Host(name="n0"), Host(name="n1"))
    answers = ask(hosts, Shell((str(fake),)), ASKED, limit_seconds=0.5)
    assert time.monotonic() - begun < 15
    assert all("does not answer" in a.problem.text for a in answers.values())
    end_what_is_left(tmp_path)


def test_an_answer_counts_while_a_connection_is_kept_for_later(here_by_another_name, tmp_path):
    """As with ControlPersist: what ssh leaves behind holds its stderr."""
    fake = Path(here_by_another_name.words[0])
    fake.write_text(
        fake.read_text().replace("shift", f"shift; sleep 30 & echo $! > {tmp_path}/left")
    )
    begun = time.monotonic()
    answers = ask((Host(name="n0"),), here_by_another_name, ASKED)
    assert answers["n0"].problem is None
    assert time.monotonic() - begun < 10
    end_what_is_left(tmp_path)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("echo 'Identity file k not accessible: No such file or directory' >&2\n"
         "echo 'Permission denied (publickey)' >&2; exit 255", "file with a key"),
        (f"echo '{host_probe.MARK}{{\"time\": 1.'", "a damaged answer"),
        ("exit 127", "does not run there"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_explained(ends, said, tmp_path):
    fake = tmp_path / "ssh"
    fake.write_text(f"#!/bin/sh\n{ends}\n")
    fake.chmod(0o755)
    given = ask((Host(name="n0"),), Shell((str(fake),)), ASKED)
    assert said in given["n0"].problem.text


def test_a_damaged_memory_of_a_host_is_no_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "poprun-py" / "hosts"
    folder.mkdir(parents=True)
    (folder / "n0.json").write_text("[1, 2")
    (folder / "n1.json").write_text("[1, 2]")
    (folder / "n3.json").write_text('{"networks": 3}')
    (folder / "n4.json").write_text('{"networks": [["eth0", "10.0.0.999", 24, false]]}')
    hosts = [Host(name=f"n{i}") for i in range(5)]
    assert preflight.cached(hosts) == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/cache")
    assert preflight.cached(hosts) == {}
