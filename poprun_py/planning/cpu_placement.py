"""Placement of instances on the NUMA nodes and CPUs of one host, with their numbers of threads.

Pure: a machine, a number of instances and a policy in, placements out. instance/binding.py binds
processes to their placement, and planning/views draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from popdist_py.errors import counted, plural
from poprun_py.display.formatting import ranges_text
from poprun_py.errors import UsageError, nearest
from poprun_py.machines.machine import Core, Machine, NumaNode

# There is a warning if thread counts differ by more than one thread and by more than this factor.
_UNEVEN = 1.5
# The launcher sets the thread count of an instance with this variable.
_PLANNED = "OMP_NUM_THREADS"

_Cores = tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The rules for dividing the cores of a host among its instances.

    Attributes:
        mode: One of ``MODES``; ``roundrobin`` is PopRun's older ``--numa-aware yes``.
        cores_per_instance: The cores of each instance; None for an even share of the host.
        reserve_cores: The cores of each instance that get no compute thread.
        smt: Whether every hardware thread, and not only every core, gets a compute thread.
        oversubscribe: Whether there may be more instances than CPUs.
        cores_option: The name of ``cores_per_instance`` in messages.
        reserve_option: The name of ``reserve_cores`` in messages.
    """

    mode: str = "spreadnuma"
    cores_per_instance: int | None = None
    reserve_cores: int = 0
    smt: bool = False
    oversubscribe: bool = False
    cores_option: str = field(default="--cores-per-instance", repr=False)
    reserve_option: str = field(default="--reserve-cores", repr=False)


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs, memory and threads of one instance.

    Attributes:
        numa_nodes: The NUMA nodes of its CPUs; empty if placement is disabled.
        memory_nodes: The nodes whose memory it may allocate; empty for all nodes.
        cpus: The CPUs that it is bound to; empty if it is not bound and may use all CPUs.
        threads: Its compute threads (OMP_NUM_THREADS): at least 1, or the number that the user set.
    """

    numa_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    threads: int


def place(machine: Machine, num_instances: int, policy: PlacementPolicy) -> tuple[Placement, ...]:
    """Return one placement for each of the ``num_instances`` local instances of a host.

    As with PopRun, a single instance without ``cores_per_instance`` may use all CPUs that other
    jobs leave free.

    Raises:
        UsageError: The instances do not fit the machine. The message contains the numbers.
    """
    cores = machine.usable_cores
    _check(cores, num_instances, policy)
    if policy.mode == "disabled" or (num_instances == 1 and policy.cores_per_instance is None):
        return _unrestricted(machine, cores, num_instances, policy)
    shares = _MODES[policy.mode](cores, num_instances, policy)
    if policy.cores_per_instance is not None:
        shares = _trimmed(shares, policy)
    allowed = shares
    if policy.mode == "roundrobin" and policy.cores_per_instance is None:
        # --numa-aware yes binds an instance to a whole node and divides only the threads.
        by_node = _by_node(cores)
        allowed = [by_node[i % len(by_node)] for i in range(num_instances)]
    threads = _threads(machine, shares, len(cores) < num_instances, policy)
    nodes = [tuple(sorted({core.numa_node for core in share})) for share in allowed]
    memory = _memory_nodes(machine, nodes)
    cpus = [tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in allowed]
    return tuple(map(Placement, nodes, memory, cpus, threads))


def place_anyway(
    machine: Machine, num_instances: int, policy: PlacementPolicy
) -> tuple[tuple[Placement, ...], str]:
    """Return placements even for instances that do not fit, and the error text of ``place``.

    The text is empty if the instances fit. This makes it possible to show a plan for a
    larger machine.

    Raises:
        UsageError: The instances fit no machine at all.
    """
    try:
        return place(machine, num_instances, policy), ""
    except UsageError as error:
        return place(machine, num_instances, replace(policy, oversubscribe=True)), str(error)


def placement_warnings(
    machine: Machine,
    placements: Sequence[Placement],
    *,
    user_threads: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return warnings about the placements of one host, one sentence each.

    ``user_threads`` are the thread counts that the user set, by variable. A count that the user set
    with OMP_NUM_THREADS replaces the planned counts.
    """
    cpus = sum(len(core.cpus) for core in machine.usable_cores)
    by_variable = [{_PLANNED: placement.threads, **user_threads} for placement in placements]
    threads = [max(counts.values()) for counts in by_variable] or [0]
    warnings = []
    if len(placements) > cpus:
        warnings.append(
            f"{len(placements)} instances share {counted(cpus, 'CPU')}: at most {cpus} "
            f"{plural('run', 2 if cpus == 1 else 1)} at any time"
        )
    if sum(threads) > cpus and max(threads) > 1:
        warnings.append(
            f"{sum(threads)} compute threads on {counted(cpus, 'CPU')}: set "
            f"{max(by_variable[0], key=lambda name: by_variable[0][name])} to at most "
            f"{max(1, cpus // len(placements))}"
        )
    elif machine.quota_cpus is not None and sum(threads) > machine.quota_cpus:
        warnings.append(
            f"{sum(threads)} compute threads under a CPU quota of "
            f"{counted(machine.cpu_quota or 0, 'CPU', 'g')}: "
            "they are stopped by turns; start fewer instances or raise the quota"
        )
    if max(threads) > max(_UNEVEN * min(threads), min(threads) + 1):
        warnings.append(
            f"instances have from {min(threads)} to {max(threads)} compute threads and wait for "
            "the slowest: --process-placement spreadcores divides evenly"
        )
    return tuple(warnings)


# --- checks -----------------------------------------------------------------------------------


def _check(cores: _Cores, num_instances: int, policy: PlacementPolicy) -> None:
    """Raise UsageError for instances that no mode can place."""
    if policy.mode not in MODES:
        raise UsageError(
            f"placement mode {policy.mode!r}: expected one of {', '.join(MODES)}"
            f"{nearest(policy.mode, MODES)}"
        )
    if num_instances < 1:
        raise UsageError(f"{num_instances} instances on a host: expected at least 1")
    cpus = sum(len(core.cpus) for core in cores)
    if policy.oversubscribe:
        return
    if num_instances > cpus:
        raise UsageError(
            f"{num_instances} instances on a host with {counted(cpus, 'usable CPU')}: expected "
            "at most "
            f"{cpus}; start fewer, use more hosts, or allow it with --oversubscribe"
        )
    wanted = (policy.cores_per_instance or 0) * num_instances
    if wanted > len(cores):
        raise UsageError(
            f"{policy.cores_option} {policy.cores_per_instance} for "
            f"{counted(num_instances, 'instance')} needs {counted(wanted, 'core')}: the host "
            f"has {len(cores)}; ask for at most "
            f"{len(cores) // num_instances}, or allow it with --oversubscribe"
        )


def _trimmed(shares: list[_Cores], policy: PlacementPolicy) -> list[_Cores]:
    """Return the first ``cores_per_instance`` cores of each share."""
    wanted = policy.cores_per_instance
    assert wanted is not None
    for index, share in enumerate(shares):
        if len(share) < wanted and not policy.oversubscribe:
            nodes = ranges_text([core.numa_node for core in share])
            raise UsageError(
                f"{policy.cores_option} {wanted}: {policy.mode} gives local instance {index} only "
                f"{counted(len(share), 'core')} (of NUMA node {nodes}); ask for at most "
                f"{min(map(len, shares))}, or use --process-placement packnuma"
            )
    return [share[:wanted] for share in shares]


# --- modes: cores -> one share for each instance ------------------------------------------------


def _spread_numa(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    return _spread(_by_node(cores), num_instances)


def _spread_l3(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    # With sub-NUMA clusters, some kernels report one L3 for several nodes. The node is therefore
    # part of the key. Without information about L3, the groups are the nodes.
    return _spread(_grouped(cores, lambda core: (core.numa_node, core.l3)), num_instances)


def _spread_cores(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    return _spread([cores], num_instances)


def _pack_numa(cores: _Cores, num_instances: int, policy: PlacementPolicy) -> list[_Cores]:
    """Fill one node after another with equal shares, without crossing nodes if possible."""
    if len(cores) < num_instances:
        return _spread_cores(cores, num_instances, policy)
    size = min(policy.cores_per_instance or len(cores), len(cores) // num_instances)
    whole = [
        node[start : start + size]
        for node in _by_node(cores)
        for start in range(0, len(node) - size + 1, size)
    ]
    if len(whole) < num_instances:
        # The shares do not fit into single nodes, so the cores are divided in order across nodes.
        whole = [cores[i * size : (i + 1) * size] for i in range(num_instances)]
    return whole[:num_instances]


def _round_robin(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    """Give local instance i the node i modulo the number of nodes, and divide each node's cores."""
    nodes = _by_node(cores)
    if len(cores) < num_instances:
        nodes = [_hardware_threads(node) for node in nodes]
    shares = []
    for index, node in enumerate(nodes):
        shares.append(_divide_cores(node, len(range(index, num_instances, len(nodes)))))
    return [shares[i % len(nodes)][i // len(nodes)] for i in range(num_instances)]


_MODES: dict[str, Callable[[_Cores, int, PlacementPolicy], list[_Cores]]] = {
    "spreadnuma": _spread_numa,
    "packnuma": _pack_numa,
    "spreadcores": _spread_cores,
    "spreadl3": _spread_l3,
    "roundrobin": _round_robin,
}
MODES = (*_MODES, "disabled")


def _spread(groups: list[_Cores], num_instances: int) -> list[_Cores]:
    """Divide groups of cores among instances.

    If no instance would be without a group, each one gets whole neighbouring groups, and the
    numbers of groups differ by at most one. Otherwise instance i gets a share of the group that
    contains core ⌊i·cores/instances⌋ of the host, which is group ⌊i·groups/instances⌋ if all groups
    are equal.
    """
    if num_instances <= len(groups):
        return [
            tuple(core for group in groups[start:stop] for core in group)
            for start, stop in _cuts(len(groups), num_instances)
        ]
    if sum(map(len, groups)) < num_instances:
        groups = [_hardware_threads(group) for group in groups]
    ends = list(accumulate(map(len, groups)))
    counts, group = [0] * len(groups), 0
    for i in range(num_instances):
        while i * ends[-1] // num_instances >= ends[group]:
            group += 1
        counts[group] += 1
    return [
        share
        for cores, count in zip(groups, counts, strict=True)
        for share in _divide_cores(cores, count)
    ]


def _divide_cores(cores: _Cores, parts: int) -> list[_Cores]:
    """Divide cores into ``parts`` whose sizes differ by at most one; fast cores come first in each.

    Every efficiency class is divided separately. An instance with only slow cores would slow down
    the others, because the instances wait for one another at every step. If there are fewer cores
    than parts, some parts share a core.
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
        # Shares with an additional core of this class come last in the next class.
        offset = (offset + len(of_class)) % parts
    return shares


def _cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """Return ``parts`` contiguous ranges over ``total``; the first ``total % parts`` are longer."""
    size, remainder = divmod(total, parts)
    return list(pairwise(i * size + min(i, remainder) for i in range(parts + 1)))


def _grouped(cores: _Cores, key: Callable[[Core], tuple[int | None, ...]]) -> list[_Cores]:
    """Return the cores grouped by ``key``. Groups are in the order of their keys, None first."""
    groups: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        groups.setdefault(tuple(-1 if k is None else k for k in key(core)), []).append(core)
    return [tuple(groups[k]) for k in sorted(groups)]


def _by_node(cores: _Cores) -> list[_Cores]:
    return _grouped(cores, lambda core: (core.numa_node,))


def _hardware_threads(cores: _Cores) -> _Cores:
    """Return each hardware thread as a core, for hosts with more instances than cores."""
    return tuple(replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus)


# --- threads and memory -------------------------------------------------------------------------


def _unrestricted(
    machine: Machine, cores: _Cores, num_instances: int, policy: PlacementPolicy
) -> tuple[Placement, ...]:
    """Return placements without binding, or bound to the CPUs that other jobs leave free.

    The instances divide the threads evenly.
    """
    nodes = tuple(sorted({core.numa_node for core in cores})) if policy.mode != "disabled" else ()
    shares = _spread_cores(cores, num_instances, policy)
    if policy.cores_per_instance is not None:
        shares = _trimmed(shares, policy)
    threads = _threads(machine, shares, len(cores) < num_instances, policy)
    bound = Placement(numa_nodes=nodes, memory_nodes=(), cpus=(), threads=1)
    if machine.held_cpus:
        nodes = tuple(sorted({core.numa_node for core in cores}))
        cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
        bound = Placement(nodes, _memory_nodes(machine, [nodes])[0], cpus, threads=1)
    return tuple(replace(bound, threads=count) for count in threads)


def _threads(
    machine: Machine, shares: list[_Cores], cores_are_shared: bool, policy: PlacementPolicy
) -> list[int]:
    """Return the number of compute threads of each instance, at least 1.

    It is the number of its cores (or hardware threads) without the reserved cores, but not more
    than its part of the CPU quota. Instances that share cores get one thread each.
    """
    quotas = [None] * len(shares) if machine.quota_cpus is None else [
        stop - start for start, stop in _cuts(machine.quota_cpus, len(shares))
    ]  # fmt: skip
    reserved = policy.reserve_cores
    counts = []
    for index, (share, quota) in enumerate(zip(shares, quotas, strict=True)):
        if reserved >= len(share) and reserved > 0 and not policy.oversubscribe:
            raise UsageError(
                f"{policy.reserve_option} {reserved}: local instance {index} has "
                f"{counted(len(share), 'core')}, at most {len(share) - 1} can be reserved; "
                "start fewer instances or "
                "reserve fewer"
            )
        compute = share[: max(1, len(share) - reserved)]
        count = sum(len(core.cpus) for core in compute) if policy.smt else len(compute)
        if cores_are_shared and not policy.smt:
            count = 1
        if quota is not None:
            count = min(count, quota - reserved)
        counts.append(max(1, count))
    return counts


def _memory_nodes(machine: Machine, numa_nodes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the memory nodes for the NUMA nodes of each instance.

    A node uses its own memory. A node without memory uses the nearest memory. Memory without CPUs
    is used by the nodes nearest to it. If every instance may use all memory, all results are empty.
    """
    # A kernel that reports no sizes is taken to have memory on every node.
    stated = any(node.memory_bytes for node in machine.numa_nodes)
    memory = [
        node
        for node in machine.numa_nodes
        if node.index in machine.allowed_memory_nodes and (node.memory_bytes or not stated)
    ]
    order = {node.index: i for i, node in enumerate(machine.numa_nodes)}
    with_cpus = [node for node in machine.numa_nodes if node.cpus]
    memory_of: dict[int, set[int]] = {node.index: set() for node in with_cpus}
    for node in memory:
        for near in [node] if node.cpus else _nearest(node, with_cpus, order):
            memory_of[near.index].add(node.index)
    for node in with_cpus:
        if not memory_of[node.index]:
            memory_of[node.index] = {near.index for near in _nearest(node, memory, order)}
    usable = [{index for node in nodes for index in memory_of[node]} for nodes in numa_nodes]
    if all(len(indices) == len(memory) for indices in usable):
        return [()] * len(usable)
    return [tuple(sorted(indices)) for indices in usable]


def _nearest(node: NumaNode, others: Sequence[NumaNode], order: dict[int, int]) -> list[NumaNode]:
    """Return the nodes of ``others`` at the smallest distance from ``node``."""
    least = min((node.distances[order[other.index]] for other in others), default=0)
    return [other for other in others if node.distances[order[other.index]] == least]
