"""Jobs side by side on another host: what runs there is planned around, leased, and given back."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
ONE_EACH = ["-n", "2", "--num-replicas", "2", "--cores-per-instance", "1"]
SHOW = """
import os, socket, sys, time
from pathlib import Path
name = sys.argv[1]
cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
Path(f"{name}.{socket.gethostname()}").write_text(cpus)
while not Path(f"{name}.end").exists():
    time.sleep(0.01)
"""


def leases(host):
    return json.loads(host.poprun("--print-leases=json").stdout)


def holders(host):
    return [job["program"] for job in leases(host)["jobs"]]


@pytest.fixture
def job(lab, tmp_path):
    """Start a job of the program on a host, by name; it ends when the test does, or is told to."""
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    started = {}

    def start(host, name, *words):
        started[name] = host.start(
            sys.executable, "-m", "poprun_py", *words, sys.executable, program, tmp_path / name
        )
        return started[name]

    def end(name):
        (tmp_path / f"{name}.end").touch()
        return started[name].communicate(timeout=120)

    start.end = end
    start.folder = tmp_path

    def cpus(name, host):
        file = tmp_path / f"{name}.{host}"
        wait_until(lambda: (file.exists() and file.read_text()) or started[name].poll() is not None)
        return file.read_text()

    start.cpus = cpus
    yield start
    for name in started:
        with contextlib.suppress(Exception):
            end(name)


def test_a_job_of_two_hosts_holds_cpus_of_both_and_plans_around_others(lab, job):
    # Something else has a CPU of the other host.
    job(lab[1], "there", "-n", "1", "--cores-per-instance", "1")
    first = job.cpus("there", "node1")
    job(lab[0], "both", "--host", lab.names(), *ONE_EACH)
    second = job.cpus("both", "node1")
    assert first != second
    assert job.cpus("both", "node0") == first
    assert (len(holders(lab[0])), len(holders(lab[1]))) == (1, 2)
    # Nothing is left there: refused before anything starts, with who holds what.
    refused = lab[0].poprun("--host", lab.names(), *ONE_EACH, "touch", job.folder / "started")
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1), refused.stderr
    assert len(refused.stderr) <= 161
    assert (
        "error: this job got no CPUs; add --share-cores yes or --wait-for-resources: run "
    ) in refused.stderr
    assert "of host node1" in refused.stderr
    assert not (job.folder / "started").exists()
    # It is waited for, also there.
    waiting = job(lab[0], "third", "--host", lab.names(), *ONE_EACH, "--wait-for-resources")
    assert "waiting for CPUs of host node1: root's show.py" in waiting.stderr.readline()
    job.end("there")
    assert job.cpus("third", "node1") == first
    for name in ("both", "third"):
        job.end(name)
    assert [*holders(lab[0]), *holders(lab[1])] == []


def test_what_was_taken_meanwhile_is_refused_by_the_host_itself(lab, job):
    # Without a look at the hosts nobody knows before.
    assert lab[0].poprun("--host", lab.names(), *ONE_EACH, "true").returncode == 0
    job(lab[1], "there", "-n", "1")
    job.cpus("there", "node1")
    words = ["--host", lab.names(), *ONE_EACH, "--no-check"]
    refused = lab[0].poprun(*words, "touch", job.folder / "started")
    assert (refused.returncode, refused.stderr.count("\n")) == (3, 1), refused.stderr
    assert (
        "error: this job got no CPUs; add --share-cores yes or --wait-for-resources: run "
    ) in refused.stderr
    assert "of host node1" in refused.stderr
    assert not (job.folder / "started").exists()
    shared = lab[0].poprun(*words, "--share-cores", "yes", "true")
    assert shared.returncode == 0, shared.stderr
    assert "warning: this job shares CPU" in shared.stderr
    assert "of host node1 with run " in shared.stderr
    assert len(holders(lab[1])) == 1
    # By default a job that asks for no cores shares them, in one line, with or without a look.
    for look in ([], ["--no-check"]):
        words = ["--host", lab.names(), "-n", "2", "--num-replicas", "2", *look]
        default = lab[0].poprun(*words, "true")
        assert (default.returncode, default.stderr.count("\n")) == (0, 1), default.stderr
        assert "warning: this job shares CPU" in default.stderr
        assert "to avoid sharing, give --share-cores no" in default.stderr
