"""The hosts of a job come from options, variables, Slurm or this machine, and get names."""

from __future__ import annotations

import socket

import pytest

from poprun_py.errors import UsageError
from poprun_py.machines.host_list import (
    LOCALHOST,
    Host,
    parse_host_list,
    parse_tasks_per_node,
    resolve_hosts,
    slurm_tasks,
    with_names,
)
from poprun_py.options.launch_config import LaunchConfig


def resolved(environ=None, files=None, **options):
    return resolve_hosts(
        LaunchConfig(**options),
        environ or {},
        read_text=(files or {}).__getitem__,
        local_names=frozenset({"here"}),
    )


def test_the_order_of_the_sources():
    slurm = {"SLURM_JOB_NODELIST": "s[1-2]"}
    kubernetes = {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
    files = {
        "/etc/mpi/hostfile": "job-worker-0.job slots=1\njob-worker-1.job slots=1\n",
        "f": "x\n",
    }

    def first(*args, **options):
        return resolved(*args, **options)[0].name

    assert first({**slurm, **kubernetes}, files, host="a") == "a"
    assert first({**slurm, **kubernetes}, files, host_file="f") == "x"
    assert first({**slurm, **kubernetes}, files) == "s1"
    assert [h.name for h in resolved(kubernetes, files)] == ["job-worker-0.job", "job-worker-1.job"]
    assert resolved() == (LOCALHOST,)


@pytest.mark.parametrize("name", ["here", "HERE", "Localhost", "127.0.0.1", "[::1]:2"])
def test_this_machine_is_recognised_by_its_names(name):
    hosts = resolved(host=f"{name},there")
    assert [host.is_local for host in hosts] == [True, False]


def test_two_names_of_this_machine_are_one_host_given_twice():
    with pytest.raises(UsageError, match="localhost and here are both this machine"):
        resolved(host="localhost,a,here")


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [("2(x3),1", 4, [2, 2, 2, 1]), ("4", 1, [4]), ("4", 3, [4, 4, 4]), ("1,2(x2)", 3, [1, 2, 2])],
)
def test_the_short_form_of_slurms_tasks_is_expanded(text, count, expected):
    assert parse_tasks_per_node(text, count) == expected


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(x9)", "-1", "1,1,1", "2(x99999999)"])
def test_invalid_or_unfitting_tasks_are_rejected(text):
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE"):
        parse_tasks_per_node(text, 2)


def test_tasks_of_an_allocation_limit_the_instances():
    environ = {
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
    assert [h.slots for h in resolved(environ, num_instances=4)] == [2, 2]
    with pytest.raises(UsageError) as caught:
        resolved(environ, num_instances=8)
    assert "--ntasks-per-node=4" in str(caught.value)
    assert "--num-instances 4" in str(caught.value)
    # Slurm's default of one task for each node is not a request of the user.
    unasked = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert [h.slots for h in resolved(unasked, num_instances=8)] == [None, None]
    # In a step the variables describe the step.
    assert resolved({**environ, "SLURM_STEP_ID": "0"}, num_instances=8)[0].slots is None


def test_one_task_with_several_cpus_is_divided_among_instances():
    environ = {
        "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    with pytest.raises(UsageError, match="Slurm allocated 1 task to"):
        resolved({**environ, "SLURM_CPUS_PER_TASK": "1"}, num_instances=8)
    hosts = resolved({**environ, "SLURM_CPUS_PER_TASK": "4"}, num_instances=8)
    assert [host.slots for host in hosts] == [None, None]
    # Several tasks on a node are instances, whatever the number of their CPUs.
    several = {**environ, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
    hosts = resolved({**several, "SLURM_CPUS_PER_TASK": "4"}, num_instances=4)
    assert [host.slots for host in hosts] == [2, 2]


def test_the_tasks_for_open_mpi_are_those_of_the_plan():
    environ = {"SLURM_JOB_NODELIST": "n[0-2]", "SLURM_TASKS_PER_NODE": "1(x3)"}
    used = parse_host_list("n[1-2]", source="test")
    tasks = slurm_tasks(used, 2, environ)
    assert tasks["SLURM_TASKS_PER_NODE"] == "2(x2)"
    assert tasks["SLURM_JOB_NODELIST"] == "n1,n2"
    assert slurm_tasks(used, 2, {}) == {}


# --- names of IPv6 addresses ---------------------------------------------------------------------


@pytest.fixture
def resolver(monkeypatch):
    """Replace the resolver by one that knows a single address."""

    def look_up(address, flags):
        assert flags == socket.NI_NAMEREQD
        if address != ("2001:db8::2", 0):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "node2", "0"

    monkeypatch.setattr(socket, "getnameinfo", look_up)


def test_ipv6_addresses_are_replaced_by_their_names(resolver):
    hosts = with_names(
        [
            Host(name="2001:db8::1", slots=2, is_local=True),
            Host(name="2001:db8::2"),
            Host(name="node3"),
        ]
    )
    assert hosts == (
        Host(name=socket.gethostname(), slots=2, is_local=True),
        Host(name="node2"),
        Host(name="node3"),
    )


def test_an_address_without_a_name_is_rejected(resolver):
    with pytest.raises(UsageError) as caught:
        with_names([Host(name="2001:db8::9")])
    assert "no name of host 2001:db8::9 is known on this machine" in str(caught.value)
    assert "'2001:db8::9 node1' to /etc/hosts" in str(caught.value)


def test_a_host_given_by_name_and_by_address_is_rejected(resolver):
    with pytest.raises(
        UsageError, match="the name of host 2001:db8::2 is node2, which is also given; give"
    ):
        with_names([Host(name="Node2"), Host(name="2001:db8::2")])
