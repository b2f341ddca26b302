"""Placement of instances on the NUMA nodes and CPUs of one host, with their numbers of threads.

The functions here only compute values. instance/binding.py binds processes to the CPUs of their
placement, and planning/views draws placements.
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

# The launcher warns if the greatest thread count of an instance exceeds the smallest one by more
# than one thread and by more than this factor.
_UNEVEN = 1.5
# The environment variable that gives an instance its number of compute threads.
_PLANNED = "OMP_NUM_THREADS"

_Cores = tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The rules for dividing the cores of a host among its instances.

    Attributes:
        mode: One of ``MODES``; ``roundrobin`` is PopRun's older ``--numa-aware yes``.
        cores_per_instance: The number of cores of each instance; None for an even share of the
            host's cores.
        reserve_cores: The number of cores of each instance that are kept free of compute threads.
        smt: Whether an instance has a compute thread per hardware thread; if not, one per core.
        oversubscribe: Whether a host may run more instances than it has CPUs.
        cores_option: The option that error messages name for ``cores_per_instance``.
        reserve_option: The option that error messages name for ``reserve_cores``.
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
        numa_nodes: The NUMA nodes of the instance's CPUs; empty if placement is disabled.
        memory_nodes: The NUMA nodes whose memory the instance may use; empty for all nodes.
        cpus: The CPUs that the instance is bound to; empty if it may use all CPUs.
        threads: The number of compute threads of the instance (OMP_NUM_THREADS), as planned or as
            set by the user.
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
        UsageError: The machine has too few CPUs or cores for the instances. The message contains
            the numbers of instances and CPUs or cores.
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
        # With --numa-aware yes, each instance is bound to a whole NUMA node, even if several
        # instances share the node. Only the compute threads are divided among these instances.
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
    """Return the placements and an error text, even if the instances do not fit the machine.

    The error text is empty if the instances fit. With these placements, a dry run on a small
    machine can show the plan of a job that needs a larger one.

    Raises:
        UsageError: The placement mode is unknown, or the number of instances is below 1.
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

    ``user_threads`` maps the thread variables that the user set, such as MKL_NUM_THREADS, to their
    thread counts. If the user set OMP_NUM_THREADS, its count replaces the planned thread counts.
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


# --- checks that the instances fit the machine ------------------------------------------------


def _check(cores: _Cores, num_instances: int, policy: PlacementPolicy) -> None:
    """Raise UsageError if the instances cannot be placed in any placement mode."""
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
    """Return the first ``cores_per_instance`` cores of each instance's share."""
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


# --- placement modes, which divide the cores into one share for each instance -------------------


def _spread_numa(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    return _spread(_by_node(cores), num_instances)


def _spread_l3(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    # With sub-NUMA clusters, some kernels report one L3 cache for several NUMA nodes. Cores are
    # therefore grouped by node and L3 cache. If the caches are not known, each node is one group.
    return _spread(_grouped(cores, lambda core: (core.numa_node, core.l3)), num_instances)


def _spread_cores(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    return _spread([cores], num_instances)


def _pack_numa(cores: _Cores, num_instances: int, policy: PlacementPolicy) -> list[_Cores]:
    """Give each instance an equal share of cores, filling one NUMA node after another."""
    if len(cores) < num_instances:
        return _spread_cores(cores, num_instances, policy)
    size = min(policy.cores_per_instance or len(cores), len(cores) // num_instances)
    whole = [
        node[start : start + size]
        for node in _by_node(cores)
        for start in range(0, len(node) - size + 1, size)
    ]
    if len(whole) < num_instances:
        # If not all shares fit into single NUMA nodes, shares may cross the borders of nodes.
        whole = [cores[i * size : (i + 1) * size] for i in range(num_instances)]
    return whole[:num_instances]


def _round_robin(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    """Assign instances to NUMA nodes in turn, and divide each node's cores among its instances."""
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
    """Divide groups of cores (such as NUMA nodes) among instances.

    If there are at least as many groups as instances, each instance gets whole neighbouring groups,
    and the numbers of groups of two instances differ by at most one. If there are more instances
    than groups, instance i gets a share of the group that contains core ⌊i·cores/instances⌋ of the
    host. For groups of equal size, this is the group with the index ⌊i·groups/instances⌋.
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
    """Divide cores into ``parts`` lists whose lengths differ by at most one, fast cores first.

    Fast and slow cores (efficiency classes) are divided separately. An instance with only slow
    cores would slow down all other instances, because the instances wait for one another at every
    step. If there are fewer cores than parts, some parts share a core.
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
        # If the cores of an efficiency class do not divide evenly, some shares get an extra core. A
        # share that got an extra core of one class is the last to get an extra core of the next.
        offset = (offset + len(of_class)) % parts
    return shares


def _cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """Split ``range(total)`` into ``parts`` ranges whose lengths differ by at most one."""
    size, remainder = divmod(total, parts)
    return list(pairwise(i * size + min(i, remainder) for i in range(parts + 1)))


def _grouped(cores: _Cores, key: Callable[[Core], tuple[int | None, ...]]) -> list[_Cores]:
    """Return the cores grouped by ``key``. Groups are sorted by their keys, with None first."""
    groups: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        groups.setdefault(tuple(-1 if k is None else k for k in key(core)), []).append(core)
    return [tuple(groups[k]) for k in sorted(groups)]


def _by_node(cores: _Cores) -> list[_Cores]:
    return _grouped(cores, lambda core: (core.numa_node,))


def _hardware_threads(cores: _Cores) -> _Cores:
    """Split cores into one core per hardware thread, for hosts with more instances than cores."""
    return tuple(replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus)


# --- thread counts and memory nodes of instances ------------------------------------------------


def _unrestricted(
    machine: Machine, cores: _Cores, num_instances: int, policy: PlacementPolicy
) -> tuple[Placement, ...]:
    """Return placements of instances that share all usable CPUs and divide the threads evenly.

    If other jobs hold CPUs of the machine, all instances are bound to the CPUs that these jobs
    leave free. If no other job holds CPUs, the instances are not bound to CPUs.
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

    An instance gets one compute thread for each of its cores (with SMT, for each hardware thread)
    that is not reserved, but not more than its part of the CPU quota. Without SMT, an instance that
    shares its core with other instances gets one thread.
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
    """Return the memory nodes of each instance, given the NUMA nodes of its CPUs.

    The CPUs of a node use the node's own memory. The CPUs of a node without memory use the memory
    of the nearest nodes. The memory of a node without CPUs is used by the nearest nodes with CPUs.
    If every instance may use all memory, the tuple of memory nodes is empty for each instance.
    """
    # If the kernel reports no memory sizes, every node is assumed to have memory.
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
    """Return the NUMA nodes among ``others`` with the smallest distance to ``node``."""
    least = min((node.distances[order[other.index]] for other in others), default=0)
    return [other for other in others if node.distances[order[other.index]] == least]
