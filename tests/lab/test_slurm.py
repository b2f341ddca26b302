"""Jobs inside allocations of a real Slurm: the hosts come from it, and so does the remote start."""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
POPRUN = (sys.executable, "-m", "poprun_py")
FOUR = ("--num-instances", "4", "--num-replicas", "4")


@pytest.fixture(autouse=True, scope="module")
def hidden_keys(cluster):
    """Take the keys away, so that nothing can go by ssh."""
    for host in cluster.lab.hosts:
        (host.ssh / "id_ed25519").rename(host.ssh / "hidden")
    yield
    for host in cluster.lab.hosts:
        (host.ssh / "hidden").rename(host.ssh / "id_ed25519")


def places(text):
    """Return the host of every instance, in order."""
    found = [line.partition(">:")[2].split() for line in text.splitlines() if "<stdout>" in line]
    return [host for _, host, *_ in sorted(found)]


@pytest.mark.parametrize(
    "asked",
    [["-N2", "--ntasks-per-node=2"], ["-N2", "srun", "-N1", "-n1"]],
    ids=" ".join,
)
def test_an_allocation_is_used_without_naming_hosts(cluster, hello, asked):
    done = cluster.run("salloc", *asked, *POPRUN, *FOUR, hello)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == ["node0", "node0", "node1", "node1"]


def test_one_node_of_an_allocation_needs_no_remote_start(cluster, hello):
    done = cluster.run("salloc", "-N1", "-w", "node0", *POPRUN, "--num-instances", "2",
                       "--num-replicas", "2", "--print-topology=yes", hello)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == ["node0", "node0"]
    assert "node0" in done.stdout.splitlines()[3]


def test_too_few_tasks_are_refused_with_the_fix(cluster, hello):
    done = cluster.run("salloc", "-N2", "--ntasks-per-node=1", *POPRUN, *FOUR, hello)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("poprun-py: error")]
    assert len(errors) == 1
    assert "--ntasks-per-node=2" in errors[0]
    assert "--num-instances 2" in errors[0]


def test_one_other_host_alone_is_reached_by_ssh(cluster, hello):
    words = ("salloc", "-N2", *POPRUN, *FOUR, "--oversubscribe", "--host", "node1")
    done = cluster.run(*words, "--ssh-args", "-i /root/.ssh/hidden", hello)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == ["node1"] * 4
    refused = cluster.run(*words, hello)
    assert refused.returncode == 3
    assert "host node1: ssh asks for a password" in refused.stderr


def test_ssh_arguments_ask_for_ssh(cluster, hello):
    words = ("salloc", "-N2", *POPRUN, *FOUR, "--ssh-args")
    done = cluster.run(*words, "-i /root/.ssh/hidden", hello)
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == ["node0", "node0", "node1", "node1"]
    done = cluster.run(*words, "-i /root/.ssh/nothing", hello)
    assert done.returncode == 3
    assert "host node1: " in done.stderr


def test_the_batch_script_of_the_manual(cluster, hello, tmp_path):
    from lab.lab import ROOT

    manual = (ROOT / "docs" / "ddp-and-mpi.md").read_text(encoding="utf-8")
    script = manual.partition("```bash\n#!/bin/bash\n")[2].partition("```")[0]
    assert "#SBATCH" in script
    script = script.replace("poprun-py", " ".join(POPRUN)).replace("examples/ddp.py", str(hello))
    script = "".join(
        line for line in script.splitlines(keepends=True) if not line.startswith("source ")
    )
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{script}")
    states = cluster.wait_for(cluster.submit(f"--output={tmp_path}/out", tmp_path / "job.sh"))
    out = (tmp_path / "out").read_text()
    assert states == {"COMPLETED"}, out
    assert places(out) == ["node0", "node0", "node1", "node1"]


def test_check_goes_through_slurm_too(cluster, hello):
    words = ("--host", "node0,node1")  # the allocation's hosts may be named too
    done = cluster.run("salloc", "-N2", *POPRUN, *FOUR, *words, "--check", hello)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"node\[0-1\]|node0 +node1", done.stdout.splitlines()[0])


def test_a_failure_ends_the_step_everywhere(cluster, script):
    program = script(
        "import os, sys, time\nsys.exit(9) if os.environ['RANK'] == '3' else time.sleep(60)\n"
    )
    done = cluster.run("salloc", "-N2", *POPRUN, *FOUR, program)
    assert done.returncode == 9
    assert "instance 3 (replica 3) on node1 failed first" in done.stderr
    for host in cluster.lab.hosts:
        assert not host.processes(program.name)
