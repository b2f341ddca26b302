"""Placement: which NUMA nodes, CPUs and threads each instance of one host gets.

Pure: a machine, a number of instances and a policy in, placements out. Nothing is bound here
(instance/binding.py) and nothing is drawn (planning/views).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

from popdist_py.errors import counted, plural
from poprun_py.errors import UsageError, nearest
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.texts import ranges_text

# A warning is due when thread counts differ by more than one and by more than this factor.
_UNEVEN = 1.5
# The variable that tells the libraries of an instance the thread count of its placement.
_PLANNED = "OMP_NUM_THREADS"

_Cores = tuple[Core, ...]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """How a host is divided.

    Attributes:
        mode: one of ``MODES``; ``roundrobin`` is PopRun's older ``--numa-aware yes``.
        cores_per_instance: cores of each instance; None for an even share of the host.
        reserve_cores: cores of each instance that it may run on but starts no compute thread for.
        smt: a compute thread on every hardware thread instead of one per core.
        oversubscribe: allow more instances than CPUs.
        cores_option: how messages name ``cores_per_instance``.
        reserve_option: how messages name ``reserve_cores``.
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
    """Where one instance runs.

    Attributes:
        numa_nodes: the NUMA nodes of its CPUs; none when placement is disabled.
        memory_nodes: the only nodes it may allocate memory from; empty for any node.
        cpus: the only CPUs it may run on; empty for any CPU, then nothing is bound.
        threads: its compute threads (OMP_NUM_THREADS): at least 1, or the number that the user set.
    """

    numa_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    threads: int


def place(machine: Machine, num_instances: int, policy: PlacementPolicy) -> tuple[Placement, ...]:
    """Return one placement for each of the ``num_instances`` local instances of a host.

    A single instance that asks for no number of cores is not restricted, as with PopRun, but to
    what other jobs leave.

    Raises:
        UsageError: what is asked for does not fit the machine, with the numbers.
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
        # The old option binds to the node, not to a part of it; only the threads are divided.
        nodes = _by_node(cores)
        allowed = [nodes[i % len(nodes)] for i in range(num_instances)]
    threads = _threads(machine, shares, len(cores) < num_instances, policy)
    nodes_of = [tuple(sorted({core.numa_node for core in own})) for own in allowed]
    return tuple(
        Placement(
            numa_nodes=numa_nodes,
            memory_nodes=memory_nodes,
            cpus=tuple(sorted(cpu for core in own for cpu in core.cpus)),
            threads=count,
        )
        for own, numa_nodes, memory_nodes, count in zip(
            allowed, nodes_of, _memory_nodes(machine, nodes_of), threads, strict=True
        )
    )


def place_anyway(
    machine: Machine, num_instances: int, policy: PlacementPolicy
) -> tuple[tuple[Placement, ...], str]:
    """Return the placements also of what does not fit the machine, and why ``place`` refuses it.

    The second is empty for what fits: a job may be looked at on a smaller machine than its own.

    Raises:
        UsageError: no machine could take it.
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
    """Return what is questionable about the placements of one host, one sentence each.

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
    """Raise for what no mode can place."""
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
    # Some kernels report one L3 over several nodes (sub-NUMA clusters): a group is never larger
    # than a node. Without L3 information the groups are the nodes.
    return _spread(_grouped(cores, lambda core: (core.numa_node, core.l3)), num_instances)


def _spread_cores(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    return _spread([cores], num_instances)


def _pack_numa(cores: _Cores, num_instances: int, policy: PlacementPolicy) -> list[_Cores]:
    """Fill one node after another with equal shares; an instance stays in one node if it fits."""
    if len(cores) < num_instances:
        return _spread_cores(cores, num_instances, policy)
    size = min(policy.cores_per_instance or len(cores), len(cores) // num_instances)
    whole = [
        node[start : start + size]
        for node in _by_node(cores)
        for start in range(0, len(node) - size + 1, size)
    ]
    if len(whole) < num_instances:
        # The shares do not fit into single nodes: divide the cores in order, across nodes.
        whole = [cores[i * size : (i + 1) * size] for i in range(num_instances)]
    return whole[:num_instances]


def _round_robin(cores: _Cores, num_instances: int, _: PlacementPolicy) -> list[_Cores]:
    """Give local instance i node i mod nodes; instances of one node divide its cores."""
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

    No more instances than groups: whole groups, contiguous, their numbers differing by at most one.
    More: instance i lives in the group that holds core ⌊i·cores/instances⌋ of the host (on equal
    groups that is group ⌊i·groups/instances⌋), and the instances of a group divide its cores.
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
    """Divide cores into ``parts``, sizes differing by at most one, the fastest cores first in each.

    Every efficiency class is divided for itself, so that no instance gets only slow cores: the
    instances wait for one another at every step. Fewer cores than parts: cores are shared.
    """
    if parts > len(cores):
        return [(cores[i * len(cores) // parts],) for i in range(parts)]
    shares: list[_Cores] = [()] * parts
    if not parts:
        return shares
    turn = 0
    for of_class in _grouped(cores, lambda core: (-core.efficiency,)):
        for i, (start, stop) in enumerate(_cuts(len(of_class), parts)):
            shares[(i + turn) % parts] += of_class[start:stop]
        # The shares that got one core more of this class come last for the next class.
        turn = (turn + len(of_class)) % parts
    return shares


def _cuts(total: int, parts: int) -> list[tuple[int, int]]:
    """Return ``parts`` contiguous ranges over ``total``; the first ``total % parts`` are longer."""
    size, more = divmod(total, parts)
    return list(pairwise(i * size + min(i, more) for i in range(parts + 1)))


def _grouped(cores: _Cores, key: Callable[[Core], tuple[int | None, ...]]) -> list[_Cores]:
    """Return the cores by key, groups in the order of their keys (None first), cores as given."""
    groups: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        groups.setdefault(tuple(-1 if k is None else k for k in key(core)), []).append(core)
    return [tuple(groups[k]) for k in sorted(groups)]


def _by_node(cores: _Cores) -> list[_Cores]:
    return _grouped(cores, lambda core: (core.numa_node,))


def _hardware_threads(cores: _Cores) -> _Cores:
    """Return each hardware thread as if it were a core: for more instances than cores."""
    return tuple(replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus)


# --- threads and memory -------------------------------------------------------------------------


def _unrestricted(
    machine: Machine, cores: _Cores, num_instances: int, policy: PlacementPolicy
) -> tuple[Placement, ...]:
    """Bind nothing but to what other jobs leave; the threads are an even share of that."""
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
    """Return the compute threads of each instance, at least 1.

    One per core (or hardware thread), less the reserved cores, within the instance's part of the
    CPU quota. Instances that share cores get one each.
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
    """Return the memory nodes that go with each instance's NUMA nodes.

    A node's own memory; memory without CPUs belongs to the nodes nearest to it; a node without
    memory of its own uses the nearest memory there is. Empty for all where all may use all.
    """
    # Kernels that state no sizes: every node has memory.
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
    owned = [{index for node in nodes for index in memory_of[node]} for nodes in numa_nodes]
    if all(len(own) == len(memory) for own in owned):
        return [()] * len(owned)
    return [tuple(sorted(own)) for own in owned]


def _nearest(node: NumaNode, others: Sequence[NumaNode], order: dict[int, int]) -> list[NumaNode]:
    """Return those of ``others`` at the smallest distance from ``node``."""
    least = min((node.distances[order[other.index]] for other in others), default=0)
    return [other for other in others if node.distances[order[other.index]] == least]
