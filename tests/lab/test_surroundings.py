"""Hosts that are not as most are: their addresses are IPv6 alone, or their names unusual."""

from __future__ import annotations

import json
import sys

import pytest
from lab.lab import IPV6_SUBNET, Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
JOB = ("--num-instances", "2", "--num-replicas", "2")

# What the instances of a job over IPv6 listen on, and are connected with; messages and collectives
# of torch as well.
SOCKETS = """
import os, psutil, torch
import torch.distributed as dist
import popdist_py
import numpy as np
from mpi4py import MPI
popdist_py.init()
own = MPI.COMM_WORLD.rank
total = popdist_py.all_reduce(np.full(100_000, own + 1.0))
dist.init_process_group("popdist")
other = torch.ones(1) * own
dist.send(other, 1 - own) if own else dist.recv(other, 1)
dist.all_reduce(other)
for each in psutil.Process().net_connections("tcp"):
    if each.laddr.port == int(os.environ["MASTER_PORT"]):
        pass  # torch's store, which listens everywhere
    elif each.status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED):
        print("socket", each.status, each.laddr.ip)
print("sums", total[0], other.item(), os.environ["MASTER_ADDR"], os.environ["POPRUN_CONTROL"])
MPI.COMM_WORLD.barrier()
dist.destroy_process_group()
"""


def lines(stdout):
    return [line.partition(">:")[2] for line in stdout.splitlines()]


@pytest.fixture(scope="module")
def ipv6_lab(lab_permitted, tmp_path_factory):
    """Two hosts that have no IPv4 address but that of loopback."""
    with Lab(tmp_path_factory.mktemp("lab"), 2, subnet=IPV6_SUBNET) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def named_lab(lab_permitted, tmp_path_factory):
    """Two hosts whose names have upper case and underscores."""
    with Lab(tmp_path_factory.mktemp("lab"), 2, names=("Node_A", "GPU_Box01")) as hosts:
        yield hosts


def test_everything_between_hosts_without_ipv4_goes_over_ipv6(ipv6_lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SOCKETS, encoding="utf-8")
    done = ipv6_lab[0].poprun("--host", "[FD00:99::1]:1,fd00:99:0::2", *JOB,
                              "--torch-backend", "popdist", "--output-dir", tmp_path / "runs",
                              program)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "runs" / "latest" / "report.json").read_text())
    assert IPV6_SUBNET in json.dumps(report)
    said = [line.split() for line in lines(done.stdout)]
    sums = [words[1:] for words in said if words[0] == "sums"]
    assert [words[:3] for words in sums] == [["3.0", "2.0", "fd00:99::1"]] * 2
    assert all(words[3].startswith("tcp:fd00:99::1:") for words in sums)
    sockets = {tuple(words[1:]) for words in said if words[0] == "socket"}
    assert {("LISTEN", f"fd00:99::{i}") for i in (1, 2)} <= sockets
    assert {("ESTABLISHED", f"fd00:99::{i}") for i in (1, 2)} <= sockets
    assert {address for _, address in sockets} <= {"fd00:99::1", "fd00:99::2", "127.0.0.1", "::1"}


def test_hosts_without_ipv4_are_checked(ipv6_lab, hello):
    words = ("--host", "node0,node1", *JOB)
    done = ipv6_lab[0].poprun(*words, "--check", hello)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"over {IPV6_SUBNET}" in done.stdout
    done = ipv6_lab[0].poprun(*words, "--host-subnet", "fd00:77::/64", hello)
    assert done.returncode == 3
    assert (
        "node0 has no network fd00:77::/64, which --host-subnet names; the networks of the "
        f"host are: eth0 ({IPV6_SUBNET})"
    ) in done.stderr


def test_names_with_upper_case_and_underscores(named_lab, hello):
    done = named_lab[0].poprun("--host", "node_a,gpu_box[01-01]", *JOB, hello)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(lines(done.stdout)) == [
        "0 Node_A Node_A GPU_Box01",
        "1 GPU_Box01 Node_A GPU_Box01",
    ]


def test_a_failure_on_a_host_of_such_a_name(named_lab, tmp_path):
    hosts, program = tmp_path / "hosts", tmp_path / "program.py"
    hosts.write_text("Node_A slots=1\nGPU_Box01:1  # the other\n")
    program.write_text("import os\nraise SystemExit(3 * int(os.environ['RANK']))\n")
    done = named_lab[0].poprun("--host-file", hosts, *JOB, program)
    assert done.returncode == 3
    assert "instance 1 (replica 1) on GPU_Box01" in done.stderr


def test_two_names_of_one_machine(named_lab, hello):
    """Of this one in another case, which needs no look; and of another one."""
    done = named_lab[0].poprun("--host", "Node_A,node_a", *JOB, hello)
    assert done.returncode == 2
    assert "host node_a is given twice" in done.stderr
    done = named_lab[0].poprun("--host", f"{named_lab[1].address},GPU_Box01", *JOB, hello)
    assert done.returncode == 3
    assert (
        f"hosts {named_lab[1].address} and GPU_Box01 are the same machine (GPU_Box01); give"
        in done.stderr
    )


def test_standard_input_reaches_another_host_and_the_rest_is_left(named_lab, tmp_path):
    (tmp_path / "lines").write_text("a\nb\nc\n")
    job = f"{sys.executable} -m poprun_py --host root@GPU_Box01 -n 1 --output plain"
    loop = f'while read x; do {job} sh -c "echo $x; read y; echo +\\$y"; done < lines'
    done = named_lab[0].run("sh", "-c", f"cd {tmp_path}; {loop}; cat lines | {job} cat")
    assert (done.stdout, done.stderr) == ("a\n+b\nc\n+\na\nb\nc\n", "")
