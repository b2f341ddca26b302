"""Reads the machine from ``sys`` and ``proc`` under any root: what is online, and what is allowed.

Odd kernels lack any of the files; each has a stated meaning when it is missing. The values are
defined in machine.py and, with ``load_machines`` for saved ones, offered here as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from popdist_py.errors import plural
from poprun_py.machines.machine import Core, HardwareError, Machine, NumaNode
from poprun_py.machines.sysfs import ControlGroups, KernelFiles, format_cpu_list, whole_number

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_LOCAL, _REMOTE = 10, 20  # the kernel's distances where it states none
# Cores whose capacities differ by less than this share of the fastest one are of one class:
# firmware ranks even equal cores by a few percent.
_CLASS_GAP = 0.1


def read_machine(root: Path = Path("/"), *, allowed_cpus: frozenset[int] | None = None) -> Machine:
    """Read the machine whose ``sys`` and ``proc`` lie under ``root``.

    Args:
        root: ``/`` for this machine (then the affinity of this process counts too), or a folder
            with copies of ``sys`` and ``proc``.
        allowed_cpus: further limit on the CPUs that may be used.

    Raises:
        HardwareError: there is no CPU to be found, or none of them may be used.
    """
    files = KernelFiles(root)
    online = _online_cpus(files)
    groups = ControlGroups(files)
    limits = [files.status_list("Cpus_allowed_list"), *groups.allowed("cpus"), allowed_cpus]
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        limits.append(tuple(os.sched_getaffinity(0)))
    allowed = _intersect(online, limits)
    if not allowed:
        stated = "; ".join(format_cpu_list(tuple(limit)) for limit in limits if limit)
        raise HardwareError(
            f"{root}: none of the online {plural('CPU', len(online))} {format_cpu_list(online)} "
            "may be used (allowed: "
            f"{stated}); widen the affinity or the cpuset"
        )
    nodes = _read_nodes(files, online)
    memory_limits = [files.status_list("Mems_allowed_list"), *groups.allowed("mems")]
    indices = [node.index for node in nodes]
    return Machine(
        cores=_read_cores(files, online, nodes),
        numa_nodes=nodes,
        allowed_cpus=allowed,
        # A copied root may name only nodes that do not exist: then all nodes are allowed.
        allowed_memory_nodes=_intersect(indices, memory_limits) or frozenset(indices),
        cpu_quota=groups.cpu_quota(),
    )


def _intersect(start: Iterable[int], limits: Iterable[Iterable[int] | None]) -> frozenset[int]:
    """Return the numbers of ``start`` that every stated limit allows; None states none."""
    left = set(start)
    for limit in limits:
        if limit is not None:
            left.intersection_update(limit)
    return frozenset(left)


def _online_cpus(files: KernelFiles) -> tuple[int, ...]:
    """Return the online CPUs, from the first source that this kernel has."""
    online = files.cpu_list(f"{_CPU}/online")
    if not online:
        folders = files.numbered(_CPU, "cpu")
        online = tuple(cpu for cpu in folders if files.number(f"{_CPU}/cpu{cpu}/online") != 0)
    if not online:
        numbers = (
            line.partition(":")[2].strip()
            for line in (files.text("proc/cpuinfo") or "").splitlines()
            if line.startswith("processor")
        )
        online = tuple(sorted(int(n) for n in numbers if n.isascii() and n.isdigit()))
    if not online:
        raise HardwareError(
            f"{files.root}: no CPUs found; expected a folder that holds {_CPU} and proc"
        )
    return online


def _read_nodes(files: KernelFiles, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes; every online CPU is in exactly one of them."""
    indices = files.numbered(_NODE, "node")
    listed = {index: files.cpu_list(f"{_NODE}/node{index}/cpulist") or () for index in indices}
    seen: set[int] = set()
    cpus_of: dict[int, list[int]] = {index: [] for index in indices} or {0: []}
    present = set(online)
    for index in indices:
        cpus_of[index] = [c for c in listed[index] if c in present and c not in seen]
        seen.update(cpus_of[index])
    # Kernels without NUMA, and CPUs that no node lists: all belong to the first node.
    first = min(cpus_of)
    cpus_of[first] = sorted({*cpus_of[first], *(present - seen)})
    nodes = []
    for position, (index, cpus) in enumerate(cpus_of.items()):
        meminfo = files.text(f"{_NODE}/node{index}/meminfo") if indices else None
        if meminfo is None and len(cpus_of) == 1:
            meminfo = files.text("proc/meminfo")
        nodes.append(
            NumaNode(
                index=index,
                cpus=tuple(cpus),
                memory_bytes=_memory_total(meminfo or ""),
                distances=_distances(files, index, position, len(cpus_of)),
            )
        )
    return tuple(nodes)


def _memory_total(meminfo: str) -> int:
    """Return MemTotal in bytes; 0 where it is not stated."""
    for line in meminfo.splitlines():
        head, _, value = line.partition("MemTotal:")
        words = value.split()
        size = whole_number(words[0]) if words else None
        if size is not None and size >= 0 and (not head or head.startswith("Node ")):
            return size * 1024
    return 0


def _distances(files: KernelFiles, index: int, position: int, count: int) -> tuple[int, ...]:
    words = (files.text(f"{_NODE}/node{index}/distance") or "").split()
    numbers = [number for word in words if (number := whole_number(word)) is not None]
    if len(numbers) == len(words) == count and min(numbers) >= 0:
        return tuple(numbers)
    return tuple(_LOCAL if i == position else _REMOTE for i in range(count))


def _read_cores(
    files: KernelFiles, online: tuple[int, ...], nodes: tuple[NumaNode, ...]
) -> tuple[Core, ...]:
    """Return the cores, ordered by NUMA node, package, L3 group and lowest CPU.

    Each group's list is read once, not once for each of its CPUs: with 256 CPUs the reading takes
    most of the time.
    """
    siblings = _groups(files, online, ("topology/core_cpus_list", "topology/thread_siblings_list"))
    caches = _groups(files, online, (_l3_file(files, online[0]),))
    packages = _packages(files, online)
    leader_of = _core_leaders(files, online, packages, siblings)
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    # Some virtual machines report siblings in two nodes. Such a core is split: none spans nodes.
    members: dict[tuple[int, int], list[int]] = {}
    for cpu in online:
        members.setdefault((leader_of[cpu], node_of[cpu]), []).append(cpu)
    leaders = [cpus[0] for cpus in members.values()]
    classes = _efficiency_classes(files, leaders)
    l3_leaders = sorted({group[0] for group in caches.values()})
    l3_number = {leader: number for number, leader in enumerate(l3_leaders)}
    cores = [
        Core(
            cpus=tuple(cpus),
            package=packages.get(cpus[0], 0),
            numa_node=node_of[cpus[0]],
            l3=l3_number[caches[cpus[0]][0]] if cpus[0] in caches else None,
            efficiency=classes[cpus[0]],
        )
        for cpus in members.values()
    ]
    return tuple(sorted(cores, key=_core_order))


def _core_order(core: Core) -> tuple[int, ...]:
    return core.numa_node, core.package, -1 if core.l3 is None else core.l3, core.cpus[0]


def _groups(
    files: KernelFiles, online: tuple[int, ...], names: tuple[str | None, ...]
) -> dict[int, tuple[int, ...]]:
    """Return for each CPU the online CPUs of its group, from the first file that states it."""
    present = set(online)
    group_of: dict[int, tuple[int, ...]] = {}
    for cpu in online:
        if cpu in group_of:
            continue
        for name in names:
            listed = name and files.cpu_list(f"{_CPU}/cpu{cpu}/{name}")
            if listed and cpu in listed:
                group = tuple(c for c in listed if c in present and c not in group_of)
                group_of.update(dict.fromkeys(group, group))
                break
    return group_of


def _core_leaders(
    files: KernelFiles,
    online: tuple[int, ...],
    packages: dict[int, int],
    siblings: dict[int, tuple[int, ...]],
) -> dict[int, int]:
    """Return the lowest CPU of each CPU's core; without lists of siblings, by the core's number."""
    leaders: dict[int, int] = {}
    by_number: dict[tuple[int, int], int] = {}
    for cpu in online:
        number = None if cpu in siblings else files.number(f"{_CPU}/cpu{cpu}/topology/core_id")
        if number is None:
            leaders[cpu] = siblings.get(cpu, (cpu,))[0]
        else:
            leaders[cpu] = by_number.setdefault((packages[cpu], number), cpu)
    return leaders


def _l3_file(files: KernelFiles, cpu: int) -> str | None:
    """Return the name of the file that lists who shares the L3 cache, if the kernel has one."""
    for index in reversed(files.numbered(f"{_CPU}/cpu{cpu}/cache", "index")):
        level = files.number(f"{_CPU}/cpu{cpu}/cache/index{index}/level")
        if (index if level is None else level) == 3:
            return f"cache/index{index}/shared_cpu_list"
    return None


def _packages(files: KernelFiles, online: tuple[int, ...]) -> dict[int, int]:
    """Return the package number of each CPU; kernels that know none write -1 or nothing."""
    groups = _groups(files, online, ("topology/package_cpus_list", "topology/core_siblings_list"))
    numbers: dict[int, int] = {}
    for cpu in online:
        if cpu not in numbers:
            number = files.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id")
            group = groups.get(cpu, (cpu,))
            numbers.update(dict.fromkeys(group, max(0, number or 0)))
    return numbers


def _efficiency_classes(files: KernelFiles, cpus: list[int]) -> dict[int, int]:
    """Return the class of each CPU, 0 for the slowest, from Intel's PMUs or the CPU capacities."""
    hybrid = {
        cpu: rank
        for rank, name in enumerate(("cpu_lowpower", "cpu_atom", "cpu_core"))
        for cpu in files.cpu_list(f"sys/devices/{name}/cpus") or ()
    }
    if hybrid:
        return _dense({cpu: hybrid.get(cpu, 0) for cpu in cpus})
    if files.number(f"{_CPU}/cpu{cpus[0]}/cpu_capacity") is None:
        return dict.fromkeys(cpus, 0)
    capacity = {cpu: files.number(f"{_CPU}/cpu{cpu}/cpu_capacity") or 0 for cpu in cpus}
    gap = _CLASS_GAP * max(capacity.values())
    ranks, rank, last = {}, 0, min(capacity.values())
    for value in sorted(set(capacity.values())):
        rank += value - last > gap
        ranks[value], last = rank, value
    return _dense({cpu: ranks[value] for cpu, value in capacity.items()})


def _dense(ranks: dict[int, int]) -> dict[int, int]:
    """Number the ranks that occur from 0."""
    number = {rank: i for i, rank in enumerate(sorted(set(ranks.values())))}
    return {cpu: number[rank] for cpu, rank in ranks.items()}
