"""The launcher's use of descriptors, and its messages when it has too few.

A process cannot raise its limits again, so each case runs in its own process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launcher.jobs import a_job
from support.repository import ROOT

from poprun_py.command.cli import run
from poprun_py.errors import StartError
from poprun_py.running.supervise.job_description import Hosts
from poprun_py.running.supervise.supervisor import supervise

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
# Processes that connect and send nothing.
CROWD = """
import os, socket, time
path = os.environ["POPRUN_CONTROL"].removeprefix("unix:")
crowd = [socket.socket(socket.AF_UNIX) for _ in range(34)]
for each in crowd: each.connect(path)
time.sleep(1000)
"""
# Each case runs in a fork, because the imports take longer than all cases together.
LIMITED = """
import json, os, resource, selectors, sys
from poprun_py.errors import StartError
from poprun_py.running.supervise.job_description import Command, Job
from poprun_py.running.supervise.supervisor import supervise

NOFILE = resource.RLIMIT_NOFILE
select, turns = selectors.DefaultSelector.select, []
selectors.DefaultSelector.select = lambda *words: turns.append(1) or select(*words)

def supervised(soft, hard, count, *command):
    resource.setrlimit(NOFILE, (soft, hard))
    seen = set()
    try:
        supervise(
            Job(
                command=Command(
                    words=command, variables=({},) * count, environ=dict(os.environ)
                )
            ),
            log=lambda _: seen.add(resource.getrlimit(NOFILE)),
        )
    except StartError as error:
        print(error)
    print(*seen, resource.getrlimit(NOFILE), sep="; ")
    print(len(turns), flush=True)

for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        supervised(*case)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def limited(*cases: tuple) -> list[list[str]]:
    """Supervise commands with limits of open files; return the three lines printed for each.

    Args:
        cases: Each has the soft and hard limit, the number of instances, and the command.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, json.dumps(cases)],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(cases)
    return [lines[at : at + 3] for at in range(0, len(lines), 3)]


def test_a_launcher_without_descriptors_gives_advice_and_does_not_spin():
    ((line, _, turns),) = limited((40, 40, 1, sys.executable, "-c", CROWD))
    assert line.startswith(
        "0 of 1 instance connected, and no more instances can connect (Too many open files)"
    )
    assert "ulimit -n" in line
    # A waiting launcher wakes up a few times a second.
    assert int(turns) < 1000


def test_the_launcher_and_mpirun_get_the_open_files_that_they_need(tmp_path):
    few, many, started = tmp_path / "few", tmp_path / "many", tmp_path / "started"

    def told(file):
        return ("sh", "-c", f"ulimit -Sn > {file}; ulimit -Hn >> {file}")

    (_, of_few, _), _, (refusal, of_refused, _) = limited(
        (100, 200, 1, *told(few)),
        (100, 300, 43, *told(many)),
        (100, 200, 43, "touch", str(started)),
    )
    # Only the launcher itself uses the hard limit.
    assert of_few == "(200, 200); (100, 200)"
    assert few.read_text().split() == ["100", "200"]
    assert many.read_text().split() == ["204", "300"]
    # A hard limit that is too low is reported before anything starts.
    assert refusal == (
        "43 instances need 204 open files, and the hard limit is 200: raise the limit (ulimit "
        "-n 204 as root, or /etc/security/limits.conf), or start fewer instances"
    )
    assert of_refused.endswith("(100, 200)")
    assert not started.exists()


@pytest.mark.mpi
def test_programs_keep_the_users_limit_where_mpirun_needs_more():
    job = [sys.executable, "-m", "poprun_py", "-n", "3", "--oversubscribe", "sh", "-c", "ulimit -n"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 40; exec "$@"', "sh", *job],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(":")[2] for line in done.stdout.splitlines()) == ["40"] * 3


def test_too_few_descriptors_at_the_start_give_one_line():
    for line, *_ in limited(*((limit, limit, 1, "true") for limit in range(4, 12))):
        assert "Too many open files" in line or "1 instance needs 36 open files" in line


def test_an_address_of_another_machine_is_named_and_all_descriptors_are_closed(capsys):
    before = sorted(map(str, Path("/proc/self/fd").iterdir()))
    job = a_job(("true",), hosts=Hosts(listen="203.0.113.1"))
    with pytest.raises(StartError) as caught:
        supervise(job, log=print)
    assert "cannot listen on 203.0.113.1 for connections of the other hosts" in str(caught.value)
    assert "--host-subnet" in str(caught.value)
    assert sorted(map(str, Path("/proc/self/fd").iterdir())) == before


def test_a_process_is_a_subreaper_only_while_it_supervises():
    """Otherwise, a program that calls the launcher would keep other orphans as zombies."""
    own = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(own), 0, 0, 0)
    for before in (0, 1):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, before, 0, 0, 0)
        try:
            with pytest.raises(StartError, match="0 of 1 instance started, then true ended"):
                supervise(a_job(("true",)), log=print)
            after = ctypes.c_int(-1)
            ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(after), 0, 0, 0)
        finally:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, own.value, 0, 0, 0)
        assert after.value == before


def test_an_error_of_the_system_is_not_reported_as_one_of_standard_output(capsys, monkeypatch):
    def launch(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("poprun_py.launching.launch.launch", launch)
    assert run(["true"]) == 3
    line = capsys.readouterr().err
    assert "Cannot assign requested address" in line
    assert "standard output" not in line
