"""Hosts that are lost, and jobs that end: what is said, and that nothing stays on any host."""

from __future__ import annotations

import re
import signal
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.lab import Lab
from lab.wire import IN, OUT, Faults, missing
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
VENV = Path(sys.prefix)
JOB = ["--num-instances", "2", "--num-replicas", "2"]
POPRUN = (sys.executable, "-m", "poprun_py")
WAITS = "import time, sys\nprint('here', flush=True)\ntime.sleep(120)\n"

# --- jobs that wait for a host that is lost -----------------------------------------------------

# How a job ended, and what it had printed before the host was lost.
Ended = namedtuple("Ended", "code stdout stderr before")


def starting(lab, folder):
    """Lose node1 while mpirun starts: its daemon says that it was started, and gets no further."""
    daemon = folder / "prted"
    daemon.write_text(f"#!/bin/sh\ntouch {folder}/started\nexec sleep 600\n")
    daemon.chmod(0o755)
    assert lab[1].run("mount", "--bind", daemon, VENV / "bin" / "prted").returncode == 0
    process = lab[0].start(*POPRUN, "--host", lab.names(), *JOB, "true")
    wait_until((folder / "started").exists, 60, "mpirun started no daemon")
    return _lost(process, lambda: lab[1].link("down"), (lab[0], "mpirun"), (lab[0], "poprun_py"))


def firewall(lab, folder):
    """Let node0 open connections, and none be opened to it."""
    lab[0].wire(Faults(firewall=(IN,)))
    return _lost(lab[0].start(*POPRUN, "--host", lab.names(), *JOB, "true"))


def link(lab, folder):
    """Lose node1 while its instance runs: its own part of the job has to end by itself."""
    process, program = start_waiting(lab, folder)
    return _lost(
        process, lambda: lab[1].link("down"), *((host, program.name) for host in lab.hosts)
    )


def each_other(lab, folder):
    """Let node1 and node2 lose each other; the launcher on node0 reaches both."""
    program = folder / "program.py"
    program.write_text(
        "import numpy as np\n"
        "import popdist_py\n"
        "popdist_py.init()\n"
        "popdist_py.all_reduce(np.ones(4))\n"
        "print('here', flush=True)\n"
        "while True: popdist_py.all_reduce(np.ones(4))\n"
    )
    process = lab[0].start(
        *(*POPRUN, "--host", lab.names(), "--num-instances", "3", "--num-replicas", "3"),
        *("--grace", "2", program),
    )
    for _ in range(3):
        assert "here" in process.stdout.readline()
    faults = Faults(dropped=(OUT,), peers=(lab[2].address,))
    return _lost(
        process, lambda: lab[1].wire(faults), *((host, program.name) for host in lab.hosts)
    )


def restart(lab, folder):
    """Switch node1 off in a job that may start again on fewer hosts."""
    program = folder / "program.py"
    program.write_text(
        "import os, socket, time\n"
        "import popdist_py\n"
        "from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, socket.gethostname(), flush=True)\n"
        "if os.environ['POPDIST_RESTART_COUNT'] == '0': time.sleep(120)\n"
    )
    process = lab[0].start(
        *(*POPRUN, "--host", lab.names(), "--num-instances", "6", "--num-replicas", "6"),
        *("--grace", "2", "--output", "plain", "--oversubscribe"),
        *("--max-restarts", "1", "--allow-fewer-hosts", program),
    )
    before = [process.stdout.readline() for _ in range(6)]
    return _lost(process, lab[1].kill, before=before)


def _lost(process, lose=lambda: None, *gone, before=()):
    """Lose a host and wait for the job's end; then wait until processes are gone from hosts."""
    lose()
    stdout, stderr = process.communicate(timeout=120)
    for host, text in gone:
        wait_until(
            lambda host=host, text=text: not host.processes(text), 60, f"{host.name} keeps {text}"
        )
    return Ended(process.returncode, stdout, stderr, before)


def start_waiting(lab, folder, *options):
    program = folder / "waiting.py"
    program.write_text(WAITS)
    process = lab[0].start(*POPRUN, "--host", lab.names(), *JOB, "--grace", "2", *options, program)
    for _ in range(2):
        assert "here" in process.stdout.readline()
    return process, program


NUM_HOSTS = {starting: 2, firewall: 2, link: 2, each_other: 3, restart: 3}
NEED_WIRE = (firewall, each_other)


@pytest.fixture(scope="module")
def ended(lab_permitted, tmp_path_factory):
    """Run all of these jobs at the same time, since they mostly wait; returns how each ended."""
    cases = [case for case in NUM_HOSTS if not (missing() and case in NEED_WIRE)]
    # Hosts end with the thread that made them.
    labs = {case: Lab(tmp_path_factory.mktemp("lab"), NUM_HOSTS[case]) for case in cases}
    try:
        for lab in labs.values():
            lab.__enter__()
        with ThreadPoolExecutor(len(cases)) as pool:
            futures = {
                case: pool.submit(case, lab, tmp_path_factory.mktemp(case.__name__))
                for case, lab in labs.items()
            }
        yield lambda case: futures[case].result()
    finally:
        for lab in labs.values():
            lab.close()


@pytest.mark.timeout(400)
def test_a_host_lost_while_mpirun_starts_is_named(ended):
    end = ended(starting)
    assert end.code == 3, end
    assert end.stderr.startswith("poprun-py: error: host node1: the host does not answer"), (
        end.stderr
    )
    assert end.stdout == ""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_firewall_between_a_host_and_the_launcher_is_named(ended):
    end = ended(firewall)
    assert end.code == 3, end
    assert "host node1: the host cannot open a connection to this machine; open" in end.stderr


def test_a_link_that_goes_down_ends_the_job(ended):
    end = ended(link)
    assert end.code not in (0, 124)
    assert "instance 1 (replica 1) on node1 failed first" in end.stderr.splitlines()[0]


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_hosts_that_lose_one_another_are_named(ended):
    end = ended(each_other)
    assert end.code == 1, end
    assert re.search(r"instance [12] \(replica [12]\) on node[12] failed first", end.stderr), end
    assert re.search(r"all_reduce.*: no answer from instance [12] on another host", end.stderr), end


def test_a_restart_leaves_out_a_host_that_is_down(ended):
    end = ended(restart)
    assert sorted(end.before) == [f"6 node{index}\n" for index in (0, 0, 1, 1, 2, 2)]
    assert end.code == 0, end
    assert sorted(end.stdout.splitlines()) == ["6 node0"] * 3 + ["6 node2"] * 3
    said = end.stderr[end.stderr.index("poprun-py: warning: the job continues") :].splitlines()
    assert said[0] == "poprun-py: warning: the job continues without host node1"
    assert said[1].startswith("poprun-py: warning: restarting the job in 1 s (restart 1 of 1)")


def test_an_interrupt_ends_the_job_on_every_host(lab, tmp_path):
    process, program = start_waiting(lab, tmp_path)
    launcher = lab[0].run("pgrep", "-f", "m poprun_py --host").stdout.split()
    lab[0].run("kill", f"-{int(signal.SIGINT)}", *launcher)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 60, f"{host.name} keeps it")
