"""Placement of instances on the NUMA nodes and CPUs of hosts, and thread counts of instances.

instance/binding.py binds the processes of an instance to the CPUs that this module assigns.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from popdist_py.errors import counted
from poprun_py.display.formatting import ranges_text
from poprun_py.errors import UsageError
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.instances_on_hosts import Topology

_Cores = tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs, memory and threads of one instance.

    Attributes:
        numa_nodes: The NUMA nodes of the instance's CPUs; empty if placement is disabled.
        memory_nodes: The NUMA nodes whose memory the instance may use; empty for all nodes.
        cpus: The CPUs that the instance is bound to; empty if the instance may use all CPUs.
        threads: The number of compute threads of the instance (OMP_NUM_THREADS), as planned or as
            set by the user.
    """

    numa_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    threads: int


def place_instances(
    config: LaunchConfig, topology: Topology, machines: tuple[Machine | None, ...]
) -> tuple[list[Placement], str]:
    """Place the instances of every host on the CPUs of the host.

    If a machine is too small for its instances, the second returned value is an error text about
    the first such machine. If all machines are large enough, the error text is empty.
    """
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
            try:
                done[id(machine)] = place(machine, count, config)
            except UsageError as error:
                refusals.append(str(error))
                shared = replace(config, oversubscribe=True)
                done[id(machine)] = place(machine, count, shared)
        placements += done[id(machine)]
    return placements, "".join(refusals[:1])


def place(machine: Machine, num_instances: int, config: LaunchConfig) -> tuple[Placement, ...]:
    """Return a placement for each of the ``num_instances`` instances of a host.

    As with PopRun, a single instance without --cores-per-instance may use all CPUs that other jobs
    do not hold. If placement is disabled, every instance may use all CPUs that other jobs do not
    hold.

    Raises:
        UsageError: The machine has too few CPUs or cores for the instances.
    """
    cores = machine.usable_cores
    size = config.cores_per_instance
    _check_numbers(cores, num_instances, config)
    mode = _mode(config)
    is_bound = mode != "disabled" and (num_instances > 1 or size is not None)
    shares = (_MODES[mode] if is_bound else _spread_cores)(cores, num_instances, size)
    if size is not None:
        _check_shares(shares, mode, config)
        shares = [share[:size] for share in shares]
    threads = _threads(machine, shares, len(cores) < num_instances, config)
    if not is_bound and not machine.held_cpus:
        nodes = _numa_nodes(cores) if mode != "disabled" else ()
        return tuple(Placement(nodes, (), (), count) for count in threads)
    allowed = shares
    if not is_bound:
        allowed = [cores] * num_instances
    elif mode == "roundrobin" and size is None:
        # With --numa-aware yes, several instances may be bound to all cores of the same NUMA
        # node. The compute threads of the NUMA node are divided among such instances.
        by_node = _by_node(cores)
        allowed = [by_node[i % len(by_node)] for i in range(num_instances)]
    numa_nodes = [_numa_nodes(share) for share in allowed]
    memory = _memory_nodes(machine, numa_nodes)
    cpus = [tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in allowed]
    return tuple(map(Placement, numa_nodes, memory, cpus, threads))


def is_unplaced(config: LaunchConfig) -> bool:
    """Return whether the options turn off the placement of instances on CPUs."""
    return _mode(config) == "disabled"


def _mode(config: LaunchConfig) -> str:
    if config.numa_aware is None:
        return config.process_placement
    return "roundrobin" if config.numa_aware else "disabled"


# --- checks that the instances fit the machine ------------------------------------------------


def _check_numbers(cores: _Cores, num_instances: int, config: LaunchConfig) -> None:
    cpus = sum(len(core.cpus) for core in cores)
    if config.oversubscribe:
        return
    if num_instances > cpus:
        raise UsageError(
            f"{num_instances} instances are planned on a host with {counted(cpus, 'usable CPU')}, "
            f"but at most {cpus} fit on this host; start fewer instances, use more hosts, or let "
            "instances share CPUs with --oversubscribe"
        )
    wanted = (config.cores_per_instance or 0) * num_instances
    if wanted > len(cores):
        raise UsageError(
            f"{config.named('cores_per_instance')} {config.cores_per_instance} for "
            f"{counted(num_instances, 'instance')} needs {counted(wanted, 'core')}, but the host "
            f"has {counted(len(cores), 'core')}; give at most {len(cores) // num_instances}, or "
            "let instances share cores with --oversubscribe"
        )


def _check_shares(shares: Sequence[_Cores], mode: str, config: LaunchConfig) -> None:
    wanted = config.cores_per_instance
    assert wanted is not None
    for index, share in enumerate(shares):
        if len(share) < wanted and not config.oversubscribe:
            raise UsageError(
                f"{config.named('cores_per_instance')} {wanted}: the process placement {mode} "
                f"gives the instance with local rank {index} only {counted(len(share), 'core')} "
                f"(of NUMA node {ranges_text(_numa_nodes(share))}); give at most "
                f"{min(map(len, shares))}, or use --process-placement packnuma"
            )


# --- placement modes: one share of the cores for each instance ----------------------------------


def _spread_cores(cores: _Cores, num_instances: int, _: int | None) -> list[_Cores]:
    return _spread([cores], num_instances)


def _pack_numa(cores: _Cores, num_instances: int, wanted: int | None) -> list[_Cores]:
    """Give each instance an equal share of cores, filling one NUMA node after another."""
    if len(cores) < num_instances:
        return _spread([cores], num_instances)
    size = min(wanted or len(cores), len(cores) // num_instances)
    whole = [
        node[start : start + size]
        for node in _by_node(cores)
        for start in range(0, len(node) - size + 1, size)
    ]
    if len(whole) < num_instances:
        # If too few shares fit into NUMA nodes, a share may contain cores of several nodes.
        whole = [cores[i * size : (i + 1) * size] for i in range(num_instances)]
    return whole[:num_instances]


def _round_robin(cores: _Cores, num_instances: int, _: int | None) -> list[_Cores]:
    """Assign instances to NUMA nodes in turn, and divide each node's cores among its instances."""
    nodes = _by_node(cores)
    if len(cores) < num_instances:
        nodes = [hardware_threads(node) for node in nodes]
    shares = [
        _divide_cores(node, len(range(index, num_instances, len(nodes))))
        for index, node in enumerate(nodes)
    ]
    return [shares[i % len(nodes)][i // len(nodes)] for i in range(num_instances)]


# With sub-NUMA clusters, some kernels report one L3 cache for several NUMA nodes. The placement
# mode spreadl3 therefore groups cores by NUMA node and L3 cache. The placement mode roundrobin is
# PopRun's older option --numa-aware yes.
_MODES: dict[str, Callable[[_Cores, int, int | None], list[_Cores]]] = {
    "spreadnuma": lambda cores, count, _: _spread(_by_node(cores), count),
    "packnuma": _pack_numa,
    "spreadcores": _spread_cores,
    "spreadl3": lambda cores, count, _: _spread(
        _grouped(cores, lambda core: (core.numa_node, core.l3)), count
    ),
    "roundrobin": _round_robin,
}
MODES = (*_MODES, "disabled")


def _spread(groups: list[_Cores], num_instances: int) -> list[_Cores]:
    """Divide groups of cores (such as NUMA nodes) among instances.

    If there are at least as many groups as instances, each instance gets whole neighbouring groups.
    The numbers of groups of any two instances differ by at most one. If there are more instances
    than groups, instance i gets some cores of the group that contains core ⌊i·cores/instances⌋ of
    the host.
    """
    if num_instances <= len(groups):
        return [
            tuple(core for group in groups[start:stop] for core in group)
            for start, stop in _cuts(len(groups), num_instances)
        ]
    if sum(map(len, groups)) < num_instances:
        groups = [hardware_threads(group) for group in groups]
    ends = list(accumulate(map(len, groups)))
    counts = Counter(bisect(ends, i * ends[-1] // num_instances) for i in range(num_instances))
    return [
        share for index, cores in enumerate(groups) for share in _divide_cores(cores, counts[index])
    ]


def _divide_cores(cores: _Cores, parts: int) -> list[_Cores]:
    """Divide cores into ``parts`` shares of nearly equal size, beginning with the fast cores.

    Fast and slow cores (efficiency classes) are divided separately, because an instance with only
    slow cores would slow down all other instances. If there are fewer cores than shares, several
    shares contain the same core.
    """
    if parts > len(cores):
        return [(cores[i * len(cores) // parts],) for i in range(parts)]
    shares: list[_Cores] = [()] * parts
    if not parts:
        return shares
    offset = 0
    for of_class in _grouped(cores, lambda core: (-core.efficiency,)):
        for i, (start, stop) in enumerate(_cuts(len(of_class), parts)):
            shares[(i + offset) % parts] += of_class[start:stop]
        # If the cores of an efficiency class do not divide evenly, some shares get one core more.
        # Shares with one core more are the last to get one core more of the next class.
        offset = (offset + len(of_class)) % parts
    return shares


def _cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """Split ``range(total)`` into ``parts`` ranges of nearly equal length."""
    size, remainder = divmod(total, parts)
    return list(pairwise(i * size + min(i, remainder) for i in range(parts + 1)))


def _grouped(cores: _Cores, key: Callable[[Core], tuple[int | None, ...]]) -> list[_Cores]:
    """Return groups of cores with equal values of ``key``, sorted by value with None first."""
    groups: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        groups.setdefault(tuple(-1 if k is None else k for k in key(core)), []).append(core)
    return [tuple(groups[k]) for k in sorted(groups)]


def _by_node(cores: _Cores) -> list[_Cores]:
    return _grouped(cores, lambda core: (core.numa_node,))


def _numa_nodes(cores: _Cores) -> tuple[int, ...]:
    return tuple(sorted({core.numa_node for core in cores}))


def hardware_threads(cores: _Cores) -> _Cores:
    """Return a core for each hardware thread of ``cores``, for hosts with too few cores."""
    return tuple(replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus)


# --- thread counts and memory nodes of instances ------------------------------------------------


def _threads(
    machine: Machine, shares: list[_Cores], cores_are_shared: bool, config: LaunchConfig
) -> list[int]:
    """Return the number of compute threads of each instance, at least 1.

    An instance gets one compute thread for each of its cores that is not reserved. With --smt, an
    instance gets one compute thread for each hardware thread of these cores. The number of threads
    is limited by the instance's part of the CPU quota. Without --smt, an instance that shares its
    core with other instances gets one thread.
    """
    quota, reserved = machine.quota_cpus, config.reserve_cores
    quota_parts = _cuts(quota or 0, len(shares))
    counts = []
    for index, (share, (start, stop)) in enumerate(zip(shares, quota_parts, strict=True)):
        if reserved >= len(share) and reserved > 0 and not config.oversubscribe:
            raise UsageError(
                f"{config.named('reserve_cores')} {reserved}: the instance with local rank {index} "
                f"has {counted(len(share), 'core')}, of which at most {len(share) - 1} can be "
                "reserved; start fewer instances, or reserve fewer cores"
            )
        compute = share[: max(1, len(share) - reserved)]
        count = _fair_count(machine, compute, config)
        if cores_are_shared and not config.smt:
            count = 1
        if quota is not None:
            count = min(count, stop - start - reserved)
        counts.append(max(1, count))
    return counts


def _fair_count(machine: Machine, cores: _Cores, config: LaunchConfig) -> int:
    """Return the number of compute threads for ``cores``, reduced by the jobs that share them.

    Measured with two jobs on two cores: with one thread instead of two, the second job makes 24
    times (layers of 64 features) or 7 times (384 features) as many training steps a second, and the
    first job no fewer. The threads of a job wait for one another, so the delay of one thread by
    another job delays all threads.
    """
    count = 0.0
    for core in cores:
        num_jobs = 1 + sum(not cpus.isdisjoint(core.cpus) for cpus in machine.sharing_jobs)
        count += (len(core.cpus) if config.smt else 1) / num_jobs
    # A sum of thirds may be slightly too small.
    return int(count + 1e-6)


def _memory_nodes(machine: Machine, numa_nodes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the NUMA nodes whose memory each instance uses, given the NUMA nodes of its CPUs.

    The CPUs of a NUMA node use the node's own memory. If a NUMA node has no memory, its CPUs use
    the memory of the nearest nodes. If a NUMA node has no CPUs, its memory is used by the nearest
    nodes with CPUs. If every instance may use all memory, the returned tuples are empty.
    """
    # If the kernel reports no memory sizes, every NUMA node is assumed to have memory.
    stated = any(node.memory_bytes for node in machine.numa_nodes)
    memory = [
        node
        for node in machine.numa_nodes
        if node.index in machine.allowed_memory_nodes and (node.memory_bytes or not stated)
    ]
    order = {node.index: i for i, node in enumerate(machine.numa_nodes)}
    with_cpus = [node for node in machine.numa_nodes if node.cpus]
    users = {node.index: _nearest(node, with_cpus, order) for node in memory if not node.cpus}
    memory_of = {}
    for node in with_cpus:
        used = {each.index for each in memory if node in users.get(each.index, (each,))}
        memory_of[node.index] = used or {near.index for near in _nearest(node, memory, order)}
    usable = [{index for node in nodes for index in memory_of[node]} for nodes in numa_nodes]
    if all(len(indices) == len(memory) for indices in usable):
        return [()] * len(usable)
    return [tuple(sorted(indices)) for indices in usable]


def _nearest(node: NumaNode, others: Sequence[NumaNode], order: dict[int, int]) -> list[NumaNode]:
    least = min((node.distances[order[other.index]] for other in others), default=0)
    return [other for other in others if node.distances[order[other.index]] == least]


# --- several jobs on the same host ----------------------------------------------------------------


class HostShare(NamedTuple):
    """The CPUs and NUMA nodes that a job uses on one host.

    ``machines`` are the machines of all hosts of the job, with the CPUs of other jobs marked as
    held. ``placements`` are the placements of all instances of the job. ``is_shareable`` is True if
    the job leaves the CPUs to other jobs. ``host_index`` is the index of the host in ``machines``;
    None if the job does not run on the host.
    """

    machines: tuple[Machine | None, ...]
    cpus: frozenset[int]
    numa_nodes: frozenset[int]
    placements: tuple[Placement, ...]
    is_shareable: bool = False
    host_index: int | None = None


def share_beside_jobs(
    config: LaunchConfig,
    topology: Topology,
    machines: tuple[Machine | None, ...],
    held: frozenset[int],
    index: int | None = None,
) -> HostShare | None:
    """Return the part of a host that a job can use beside other jobs; None if the job does not fit.

    A job with --cores-per-instance prefers NUMA nodes of which other jobs hold no CPUs. A job
    without --cores-per-instance takes all CPUs that other jobs do not hold. ``held`` are the CPUs
    that other jobs hold on the host. ``index`` is the index of the host among the hosts of the job;
    None stands for the machine on which the launcher runs.
    """
    index = _local_host(topology) if index is None else index
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return None
    held = held.intersection(cpu for core in machine.usable_cores for cpu in core.cpus)
    excluded = [held]
    if config.cores_per_instance is not None:
        shared_nodes = (node.cpus for node in machine.numa_nodes if not held.isdisjoint(node.cpus))
        excluded.insert(0, held.union(*shared_nodes))
    for cpus in excluded:
        left = replace(machine, held_cpus=machine.held_cpus | cpus)
        if not left.usable_cores:
            continue
        planned_on = (*machines[:index], left, *machines[index + 1 :])
        placements, refusal = place_instances(config, topology, planned_on)
        if not refusal:
            return share_of_placements(config, topology, planned_on, tuple(placements), index)
    return None


def share_of_placements(
    config: LaunchConfig,
    topology: Topology,
    machines: tuple[Machine | None, ...],
    placements: tuple[Placement, ...],
    index: int | None = None,
) -> HostShare:
    """Return the part of a host that a job uses if its instances have the given placements.

    If the job does not run on the host, no CPUs and NUMA nodes are returned.
    """
    index = _local_host(topology) if index is None else index
    machine = None if index is None else machines[index]
    if index is None or machine is None:
        return HostShare(machines, frozenset(), frozenset(), placements)
    count = topology.instances_per_host
    of_host = placements[index * count : (index + 1) * count]
    usable = {cpu for core in machine.usable_cores for cpu in core.cpus}
    # An instance that is not bound to CPUs may run on any usable CPU of the host.
    cpus = {cpu for each in of_host for cpu in (each.cpus or usable)}
    nodes = {node.index for node in machine.numa_nodes if not cpus.isdisjoint(node.cpus)}
    is_shareable = _is_shareable(config, machine, count)
    return HostShare(machines, frozenset(cpus), frozenset(nodes), placements, is_shareable, index)


def _is_shareable(config: LaunchConfig, machine: Machine, num_instances: int) -> bool:
    """Return whether a job leaves its CPUs on a machine to other jobs.

    The instances of such a job are not placed on CPUs, or they share CPUs with one another because
    only --oversubscribe allows so many instances on the machine.
    """
    if is_unplaced(config):
        return True
    if not config.oversubscribe:
        return False
    try:
        place(machine, num_instances, replace(config, oversubscribe=False))
    except UsageError:
        return True
    return False


def _local_host(topology: Topology) -> int | None:
    return next((i for i, host in enumerate(topology.hosts) if host.is_local), None)
