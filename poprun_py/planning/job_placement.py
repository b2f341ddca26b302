"""Placement of a whole job on the machines of its hosts, alone or beside other jobs.

A job with --cores-per-instance prefers NUMA nodes whose CPUs are all free of other jobs. A job
without this option takes all CPUs that other jobs leave free. The functions here only compute
values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement, PlacementPolicy, place_anyway
from poprun_py.planning.topology import Topology


class HostShare(NamedTuple):
    """The CPUs and NUMA nodes that a job uses on one host.

    ``machines`` are the machines of all hosts of the job, and ``placements`` are the placements of
    all its instances. In ``machines``, the CPUs of other jobs are marked as held.
    """

    machines: tuple[Machine | None, ...]
    cpus: frozenset[int]
    numa_nodes: frozenset[int]
    placements: tuple[Placement, ...]


def local_host_index(topology: Topology) -> int | None:
    """Return the index of this machine among the hosts; None if the job does not run on it."""
    return next((i for i, host in enumerate(topology.hosts) if host.is_local), None)


def place_instances(
    config: LaunchConfig, topology: Topology, machines: tuple[Machine | None, ...]
) -> tuple[list[Placement], str]:
    """Place the instances of every host on the CPUs of the host.

    Returns:
        A pair of the placements of all instances and an error text about the first machine that is
        too small for its instances. The error text is empty if the job fits.
    """
    mode = config.process_placement
    if config.numa_aware is not None:
        mode = "roundrobin" if config.numa_aware else "disabled"
    policy = PlacementPolicy(
        mode=mode,
        cores_per_instance=config.cores_per_instance,
        reserve_cores=config.reserve_cores,
        smt=config.smt,
        oversubscribe=config.oversubscribe,
        cores_option=config.named("cores_per_instance"),
        reserve_option=config.named("reserve_cores"),
    )
    count = topology.instances_per_host
    unknown = (Placement(numa_nodes=(), memory_nodes=(), cpus=(), threads=0),) * count
    done: dict[int, tuple[Placement, ...]] = {}
    placements: list[Placement] = []
    refusals: list[str] = []
    for machine in machines:
        if machine is None:
            placements += unknown
            continue
        if id(machine) not in done:
            done[id(machine)], refusal = place_anyway(machine, count, policy)
            refusals += [refusal] if refusal else []
        placements += done[id(machine)]
    return placements, "".join(refusals[:1])


def share_beside_jobs(
    config: LaunchConfig,
    topology: Topology,
    machines: tuple[Machine | None, ...],
    held: frozenset[int],
    index: int | None = None,
) -> HostShare | None:
    """Return the part of a host that the job uses beside other jobs; None if the job does not fit.

    ``held`` are the CPUs that other jobs hold on the host. ``index`` is the index of the host among
    the hosts of the job; None stands for the machine on which the launcher runs.
    """
    index = local_host_index(topology) if index is None else index
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return None
    held = held.intersection(cpu for core in machine.usable_cores for cpu in core.cpus)
    for excluded in _excluded_cpus(config, machine, held):
        left = replace(machine, held_cpus=machine.held_cpus | excluded)
        if not left.usable_cores:
            continue
        planned_on = (*machines[:index], left, *machines[index + 1 :])
        placements, refusal = place_instances(config, topology, planned_on)
        if not refusal:
            return share_of_placements(topology, planned_on, tuple(placements), index)
    return None


def share_of_placements(
    topology: Topology,
    machines: tuple[Machine | None, ...],
    placements: tuple[Placement, ...],
    index: int | None = None,
) -> HostShare:
    """Return the part of a host that the job uses with the given placements.

    ``index`` is the index of the host among the hosts of the job; None stands for the machine on
    which the launcher runs. The part is empty if the job does not run on that machine.
    """
    index = local_host_index(topology) if index is None else index
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return HostShare(machines, frozenset(), frozenset(), placements)
    count = topology.instances_per_host
    of_host = placements[index * count : (index + 1) * count]
    usable = {cpu for core in machine.usable_cores for cpu in core.cpus}
    # An instance that is not bound to CPUs may run on any usable CPU.
    cpus = {cpu for each in of_host for cpu in (each.cpus or usable)}
    nodes = {node.index for node in machine.numa_nodes if not cpus.isdisjoint(node.cpus)}
    return HostShare(machines, frozenset(cpus), frozenset(nodes), placements)


def _excluded_cpus(
    config: LaunchConfig, machine: Machine, held: frozenset[int]
) -> tuple[frozenset[int], ...]:
    """Return alternative sets of CPUs to leave to other jobs, the preferred set first."""
    if config.cores_per_instance is None or not held:
        return (held,)
    whole_nodes = {
        cpu for node in machine.numa_nodes if not held.isdisjoint(node.cpus) for cpu in node.cpus
    }
    return (frozenset(whole_nodes), held)
