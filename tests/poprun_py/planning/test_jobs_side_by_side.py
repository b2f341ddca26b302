"""The share of a machine that a job uses beside other jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.launcher.sysfs_trees import snapshot

from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import (
    MODES,
    share_beside_jobs,
    share_of_placements,
)
from poprun_py.planning.instances_on_hosts import make_topology

NAMES = ["example", "two-socket-smt", "epyc-nps4", "one-node", "hybrid", "memory-only-node"]


def share(machine, held=(), hosts=(LOCALHOST,), **options):
    config = LaunchConfig(program=("x",), **options)
    topology = make_topology(config, hosts)
    return share_beside_jobs(config, topology, (machine,) * len(hosts), frozenset(held))


def node(machine, *indices):
    return {cpu for n in machine.numa_nodes if n.index in indices for cpu in n.cpus}


@given(
    st.sampled_from(NAMES), st.sampled_from(MODES[:-2] + MODES[-1:]), st.integers(1, 5),
    st.none() | st.integers(1, 3), st.data(),
)  # fmt: skip
def test_jobs_side_by_side_have_disjoint_cores(name, mode, instances, cores, data):
    machine = snapshot(name)
    options = {"process_placement": mode, "num_instances": instances, "cores_per_instance": cores}
    held = data.draw(st.sets(st.sampled_from(sorted(machine.allowed_cpus))))
    mine = share(machine, held, **options)
    assume(mine is not None)
    assert mine.cpus <= machine.allowed_cpus
    of_core = {cpu: core for core in machine.cores for cpu in core.cpus}
    assert not {of_core[cpu] for cpu in mine.cpus} & {of_core[cpu] for cpu in held}
    for placement in mine.placements:
        assert not held or (placement.cpus and mine.cpus.issuperset(placement.cpus))
    # The next job does not use CPUs of this one.
    after = share(machine, held | mine.cpus, **options)
    assert after is None or after.cpus.isdisjoint(mine.cpus)


def test_a_job_alone_has_the_whole_machine():
    machine = snapshot("example")
    for options in ({}, {"num_instances": 2}, {"cores_per_instance": 1}):
        assert share(machine, **options).machines == (machine,)
    # CPUs of another machine do not matter.
    assert share(machine, {9999}).machines == (machine,)


def test_only_usable_cpus_of_a_cpuset_count():
    machine = snapshot("two-socket-smt")
    halves = [core.cpus[:1] for core in machine.cores[:2]]
    ours = replace(machine, allowed_cpus=frozenset(cpu for half in halves for cpu in half))
    # The siblings belong to another cpuset, where another job may hold them.
    siblings = {cpu for core in machine.cores for cpu in core.cpus[1:]}
    assert share(ours, siblings).machines == (ours,)
    assert share(ours, siblings | set(halves[0])).cpus == set(halves[1])


def test_a_job_with_cores_per_instance_prefers_free_nodes():
    machine = snapshot("epyc-nps4")
    first = share(machine, cores_per_instance=2)
    second = share(machine, first.cpus, cores_per_instance=2)
    assert first.numa_nodes == {0}
    assert second.numa_nodes == {1}
    assert second.placements[0].memory_nodes == (1,)
    # Other jobs have CPUs on all nodes, so this job shares a node with them.
    one_of_each = {node.cpus[0] for node in machine.numa_nodes}
    third = share(machine, one_of_each, cores_per_instance=2)
    assert third.numa_nodes == {0}
    assert third.cpus.isdisjoint(one_of_each)


def test_any_other_job_takes_all_free_cpus():
    machine = snapshot("epyc-nps4")
    held = node(machine, 0) | {machine.numa_nodes[1].cpus[0]}
    left = {cpu for core in machine.cores if held.isdisjoint(core.cpus) for cpu in core.cpus}
    for options in ({}, {"num_instances": 3}, {"num_instances": 2, "numa_aware": False}):
        assert share(machine, held, **options).cpus == left


def test_an_unbound_job_is_bound_to_the_free_cpus():
    machine = snapshot("epyc-nps4")
    alone, beside_one = share(machine), share(machine, node(machine, 0))
    assert alone.placements[0].cpus == ()
    assert alone.cpus == machine.allowed_cpus
    placement = beside_one.placements[0]
    assert set(placement.cpus) == machine.allowed_cpus - node(machine, 0)
    assert 0 not in placement.numa_nodes
    assert 0 not in placement.memory_nodes
    assert placement.memory_nodes != ()


@pytest.mark.parametrize(
    "options",
    [{"num_instances": 3}, {"cores_per_instance": 2}, {"num_instances": 2, "cores_per_instance": 1},
     {"reserve_cores": 1}],
)  # fmt: skip
def test_a_job_that_does_not_fit_beside_others_has_no_share(options):
    machine = snapshot("one-node")
    cores = machine.usable_cores
    held = {core.cpus[0] for core in cores[1:]}
    assert share(machine, held, **options) is None
    assert share(machine, machine.allowed_cpus, oversubscribe=True) is None


def test_only_the_share_of_this_machine_changes():
    machine = snapshot("example")
    hosts = (Host(name="far"), LOCALHOST)
    config = LaunchConfig(program=("x",), num_instances=2, cores_per_instance=1)
    held = {machine.cores[0].cpus[0]}
    mine = share(machine, held, hosts, num_instances=2, cores_per_instance=1)
    assert mine.machines[0] == machine
    assert mine.placements[0].cpus == share(machine, cores_per_instance=1).placements[0].cpus
    assert mine.cpus == set(mine.placements[1].cpus)
    far = make_topology(config, (Host(name="a"), Host(name="b")))
    assert share_of_placements(config, far, (None, None), mine.placements).cpus == frozenset()


def test_a_machine_with_held_cpus_is_saved_with_them():
    machine = replace(snapshot("example"), held_cpus=frozenset({0, 1}))
    assert Machine.from_json(machine.to_json()) == machine
    assert "held_cpus" not in snapshot("example").to_json()
