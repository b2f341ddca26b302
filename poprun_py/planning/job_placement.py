"""What a job takes of a host, and of one on which other jobs run. Pure.

A job that says how many cores it needs goes where no other job has memory, if it fits there. One
that takes all there is takes all that is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from poprun_py.machines.machine import Machine
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.launch_plan import place_instances
from poprun_py.planning.topology import Topology


class HostShare(NamedTuple):
    """What a job takes of a host: the machines to plan on, and its CPUs, NUMA nodes, placements.

    ``machines`` and ``placements`` are those of all hosts.
    """

    machines: tuple[Machine | None, ...]
    cpus: frozenset[int]
    numa_nodes: frozenset[int]
    placements: tuple[Placement, ...]


def local_host_index(topology: Topology) -> int | None:
    """Return the index of the host that is this machine, None where the job does not run here."""
    return next((i for i, host in enumerate(topology.hosts) if host.is_local), None)


def share_beside_jobs(
    config: LaunchConfig,
    topology: Topology,
    machines: tuple[Machine | None, ...],
    held: frozenset[int],
    index: int | None = None,
) -> HostShare | None:
    """Return what the job takes of a host beside jobs that hold CPUs there.

    Args:
        config: what is asked for.
        topology: who is on which host.
        machines: the machine of each host.
        held: the CPUs that other jobs hold; those that this one may use count.
        index: the host; by default this machine, which is one of them.

    Returns:
        The share; None if it does not fit on what is left.
    """
    index = local_host_index(topology) if index is None else index
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return None
    held = held.intersection(cpu for core in machine.usable_cores for cpu in core.cpus)
    for without in _candidates(config, machine, held):
        left = replace(machine, held_cpus=machine.held_cpus | without)
        if not left.usable_cores:
            continue
        planned_on = (*machines[:index], left, *machines[index + 1 :])
        placements, refusal = place_instances(config, topology, planned_on)
        if not refusal:
            return _share(topology, planned_on, tuple(placements), index)
    return None


def share_of_placements(
    topology: Topology,
    machines: tuple[Machine | None, ...],
    placements: tuple[Placement, ...],
    index: int | None = None,
) -> HostShare:
    """Return what a job takes of a host, by default of this machine, by placements that stand."""
    return _share(
        topology, machines, placements, local_host_index(topology) if index is None else index
    )


def _candidates(
    config: LaunchConfig, machine: Machine, held: frozenset[int]
) -> tuple[frozenset[int], ...]:
    """Return the CPUs to leave to others, the best first."""
    if config.cores_per_instance is None or not held:
        return (held,)
    beside_others = {
        cpu for node in machine.numa_nodes if not held.isdisjoint(node.cpus) for cpu in node.cpus
    }
    return (frozenset(beside_others), held)


def _share(
    topology: Topology,
    machines: tuple[Machine | None, ...],
    placements: tuple[Placement, ...],
    index: int | None,
) -> HostShare:
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return HostShare(machines, frozenset(), frozenset(), placements)
    count = topology.instances_per_host
    ours = placements[index * count : (index + 1) * count]
    usable = {cpu for core in machine.usable_cores for cpu in core.cpus}
    # Who is not bound may run anywhere.
    cpus = {cpu for each in ours for cpu in (each.cpus or usable)}
    nodes = {node.index for node in machine.numa_nodes if not cpus.isdisjoint(node.cpus)}
    return HostShare(machines, frozenset(cpus), frozenset(nodes), placements)
