"""The CPUs on which a launch runs beside other jobs, for its options and the leases of others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.sysfs_trees import snapshot

from poprun_py.machines.host_list import LOCALHOST
from poprun_py.machines.lease_files import JobProcess, LeaseRecord
from poprun_py.machines.lease_sharing import SharingRule
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.core_sharing import (
    OtherLeases,
    asks_for_cores,
    choose_share,
    has_advice,
    sharing_rule,
)
from poprun_py.planning.cpu_placement import place_instances, share_beside_jobs
from poprun_py.planning.instances_on_hosts import make_topology

MACHINE = snapshot("one-node")
CORES = [core.cpus for core in MACHINE.usable_cores]
ALL = frozenset(MACHINE.allowed_cpus)
JOB = JobProcess(pid=7, process_start=3, program="x")


def lease(cpus=ALL, since=1.0, **kinds):
    return LeaseRecord("lease-a", "ann", JOB, tuple(sorted(cpus)), (0,), since, **kinds)


def config_of(**options):
    return LaunchConfig(program=("x",), **options)


def chosen(*leases, is_last=False, queued_since=float("inf"), **options):
    """Return the choice for a launch on this machine beside the leases of other jobs."""
    config = config_of(**options)
    topology = make_topology(config, (LOCALHOST,))

    def beside(held):
        return share_beside_jobs(config, topology, (MACHINE,), held)

    others = OtherLeases(leases, is_last, queued_since)
    return choose_share(beside(frozenset()), beside, others, sharing_rule(config))


def threads(choice, **options):
    config = config_of(**options)
    topology = make_topology(config, (LOCALHOST,))
    placements, _ = place_instances(config, topology, choice.share.machines)
    return [each.threads for each in placements]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, (True, True)),
        ({"num_instances": 2}, (True, True)),
        ({"share_cores": "yes"}, (True, True)),
        ({"share_cores": "yes", "cores_per_instance": 1}, (True, True)),
        ({"share_cores": "no"}, (False, False)),
        ({"share_cores": "no", "process_placement": "disabled"}, (False, False)),
        ({"cores_per_instance": 1}, (False, True)),
        ({"reserve_cores": 1}, (False, True)),
        ({"wait_for_resources": 5}, (False, True)),
        ({"cores_per_instance": 1, "process_placement": "disabled"}, (True, True)),
        ({"cores_per_instance": 1, "numa_aware": False}, (True, True)),
        ({"wait_for_resources": 5, "process_placement": "disabled"}, (False, True)),
    ],
)
def test_the_rule_for_each_combination_of_options(options, rule):
    config = config_of(**options)
    assert sharing_rule(config) == SharingRule(*rule)
    assert asks_for_cores(config) == ("cores_per_instance" in options or "reserve_cores" in options)
    # The advice to wait or to refuse is only for users who did not decide.
    assert has_advice(config) == (rule[0] and "share_cores" not in options)


def test_free_cores_come_first():
    half = frozenset(cpu for cpus in CORES[: len(CORES) // 2] for cpu in cpus)
    choice = chosen(lease(half))
    assert choice.share.cpus == ALL - half
    assert (choice.shared_with, choice.is_shared) == ((), False)
    # Free CPUs also come before those of a shareable lease.
    assert chosen(lease(half, is_shareable=True)).share.cpus == ALL - half


def test_without_free_cores_all_are_shared():
    holder = lease()
    choice = chosen(holder)
    assert (choice.share.cpus, choice.shared_with, choice.is_shared) == (ALL, (holder,), True)
    assert chosen(holder, num_instances=2).share.cpus == ALL
    for options in ({"cores_per_instance": 1}, {"reserve_cores": 1}, {"share_cores": "no"}):
        assert chosen(holder, **options) is None


def test_shareable_leases_never_block_unless_the_user_forbids_sharing():
    first, rest = frozenset(CORES[0]), ALL - frozenset(CORES[0])
    strict, shareable = lease(first), lease(rest, is_shareable=True)
    choice = chosen(strict, shareable, cores_per_instance=1)
    assert choice.share.cpus < rest
    assert choice.shared_with == (shareable,)
    # A job without a request prefers the CPUs of the shareable lease as well.
    assert chosen(strict, shareable).share.cpus == rest
    assert chosen(strict, shareable, share_cores="no") is None


def test_a_job_that_shares_does_not_delay_a_job_that_waits():
    waits = {"wait_for_resources": "forever", "queued_since": 5.0}
    assert chosen(lease(since=9.0, is_shared=True), **waits).is_shared
    assert chosen(lease(since=9.0), **waits) is None
    assert chosen(lease(since=1.0, is_shared=True), **waits) is None
    # Where others wait, only a job that shares starts, and with a shared lease.
    assert chosen(is_last=True, **waits) is None
    assert chosen(is_last=True).is_shared


@pytest.mark.parametrize(
    ("options", "is_shareable"),
    [
        ({}, False),
        ({"num_instances": 2}, False),
        ({"process_placement": "disabled"}, True),
        ({"numa_aware": False}, True),
        ({"oversubscribe": True}, False),
        ({"oversubscribe": True, "num_instances": len(ALL) + 1}, True),
        ({"oversubscribe": True, "num_instances": 2, "cores_per_instance": len(CORES)}, True),
        ({"num_instances": 2, "numa_aware": True}, False),
    ],
)
def test_oversubscribed_and_unplaced_jobs_leave_their_cores_to_others(options, is_shareable):
    assert chosen(**options).share.is_shareable == is_shareable


def test_shared_cores_get_a_fair_part_of_the_threads():
    cores = len(CORES)
    assert threads(chosen(), num_instances=1) == [cores]
    assert threads(chosen(lease())) == [cores // 2]
    assert threads(chosen(lease(), lease(), lease())) == [cores // 4]
    assert threads(chosen(lease()), smt=True) == [len(ALL) // 2]
    # At least one thread.
    assert set(threads(chosen(*[lease()] * 50), num_instances=2)) == {1}
    # Of two instances, only the one beside the other job has fewer threads.
    one = lease(CORES[0])
    beside_one = chosen(one, num_instances=len(ALL), share_cores="yes")
    assert threads(beside_one, num_instances=2) == [cores // 2 - 1, cores // 2]


@given(st.lists(st.sets(st.sampled_from(sorted(ALL)), min_size=1), max_size=4), st.integers(1, 4))
def test_a_job_that_shares_always_starts_and_has_no_more_threads_than_alone(held, instances):
    choice = chosen(*map(lease, held), num_instances=instances)
    alone = threads(chosen(num_instances=instances), num_instances=instances)
    beside = threads(choice, num_instances=instances)
    assert all(1 <= ours <= most for ours, most in zip(beside, alone, strict=True))
    assert bool(choice.shared_with) == choice.is_shared


def test_a_machine_with_shared_cpus_is_saved_with_them():
    (machine,) = chosen(lease(CORES[0]), lease(), share_cores="yes").share.machines
    assert machine.sharing_jobs == (frozenset(CORES[0]), ALL)
    assert Machine.from_json(machine.to_json()) == machine
    assert "sharing_jobs" not in MACHINE.to_json()
