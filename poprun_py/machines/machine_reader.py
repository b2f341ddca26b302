"""Reads the hardware and limits of a machine from the kernel's files in ``/sys`` and ``/proc``.

The kernel's files may be copies in another folder. If a kernel's file is missing or unreadable, the
reader uses another file or a default value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from popdist_py.errors import plural
from poprun_py.display.formatting import ranges_text
from poprun_py.machines.machine import (
    Core,
    HardwareError,
    Machine,
    NumaNode,
    parse_cpu_list,
)

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
# The kernel's default distances from a NUMA node to itself and to another NUMA node.
_LOCAL, _REMOTE = 10, 20
# Cores belong to one efficiency class if the CPU capacities of the cores differ by at most a tenth
# of the highest capacity. Firmware reports slightly different capacities even for equal cores.
_CLASS_GAP = 0.1
_PROCESSOR = re.compile(r"^processor\s*:\s*(\d+)\s*$", re.ASCII | re.MULTILINE)
_NUMBER = re.compile(r"-?\d{1,15}", re.ASCII)


def read_machine(root: Path = Path("/")) -> Machine:
    """Return the machine that the files in ``sys`` and ``proc`` under ``root`` describe.

    ``root`` is a folder with copies of ``sys`` and ``proc``, or ``/`` for this machine. If ``root``
    is ``/``, the CPU affinity of this process also limits the allowed CPUs.

    Raises:
        HardwareError: No CPU is found, or none of the CPUs may be used.
    """
    files = _KernelFiles(root)
    online = _online_cpus(files)
    limits = [files.status_list("Cpus_allowed_list"), *_allowed(files, "cpus")]
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        limits.append(tuple(os.sched_getaffinity(0)))
    allowed = _intersect(online, limits)
    if not allowed:
        stated = "; ".join(ranges_text(tuple(limit)) for limit in limits if limit)
        raise HardwareError(
            f"{root}: none of the online {plural('CPU', len(online))} {ranges_text(online)} may be "
            f"used (allowed CPUs: {stated}); widen the CPU affinity or the cpuset"
        )
    nodes = _read_nodes(files, online)
    memory_limits = [files.status_list("Mems_allowed_list"), *_allowed(files, "mems")]
    indices = [node.index for node in nodes]
    return Machine(
        cores=_read_cores(files, online, nodes),
        numa_nodes=nodes,
        allowed_cpus=allowed,
        # If copied files allow only NUMA nodes that do not exist, all NUMA nodes are allowed.
        allowed_memory_nodes=_intersect(indices, memory_limits) or frozenset(indices),
        cpu_quota=_cpu_quota(files),
    )


def _intersect(start: Iterable[int], limits: Iterable[Iterable[int] | None]) -> frozenset[int]:
    """Return the numbers of ``start`` that are in all limits; a limit of None is ignored."""
    left = set(start)
    for limit in limits:
        if limit is not None:
            left.intersection_update(limit)
    return frozenset(left)


def _online_cpus(files: _KernelFiles) -> tuple[int, ...]:
    online = (
        files.cpu_list(f"{_CPU}/online")
        or tuple(
            cpu
            for cpu in files.numbered(_CPU, "cpu")
            if files.number(f"{_CPU}/cpu{cpu}/online") != 0
        )
        or tuple(sorted(map(int, _PROCESSOR.findall(files.text("proc/cpuinfo") or ""))))
    )
    if not online:
        raise HardwareError(
            f"{files.root}: no CPUs were found; expected a folder that contains {_CPU} and proc"
        )
    return online


def _read_nodes(files: _KernelFiles, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes; each online CPU is in exactly one node."""
    indices = files.numbered(_NODE, "node")
    left = set(online)
    cpus_of: dict[int, list[int]] = {}
    for index in indices:
        listed = files.cpu_list(f"{_NODE}/node{index}/cpulist") or ()
        cpus_of[index] = [cpu for cpu in listed if cpu in left]
        left.difference_update(listed)
    # CPUs that no NUMA node lists are assigned to the first NUMA node. On a machine without NUMA,
    # the first node therefore gets all CPUs.
    first = min(cpus_of, default=0)
    cpus_of[first] = sorted({*cpus_of.get(first, ()), *left})
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
    """Return MemTotal of a meminfo file in bytes; 0 if the file has no entry MemTotal."""
    for line in meminfo.splitlines():
        head, _, value = line.partition("MemTotal:")
        words = value.split()
        size = _whole_number(words[0]) if words else None
        if size is not None and size >= 0 and (not head or head.startswith("Node ")):
            return size * 1024
    return 0


def _distances(files: _KernelFiles, index: int, position: int, count: int) -> tuple[int, ...]:
    words = (files.text(f"{_NODE}/node{index}/distance") or "").split()
    numbers = [number for word in words if (number := _whole_number(word)) is not None]
    if len(numbers) == len(words) == count and min(numbers) >= 0:
        return tuple(numbers)
    return tuple(_LOCAL if i == position else _REMOTE for i in range(count))


def _read_cores(
    files: _KernelFiles, online: tuple[int, ...], nodes: tuple[NumaNode, ...]
) -> tuple[Core, ...]:
    """Return the cores, sorted by NUMA node, package, L3 group and lowest CPU number."""
    packages = _packages(files, online)
    leader_of = _core_leaders(files, online, packages)
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    # If a virtual machine reports the SMT siblings of a core in two NUMA nodes, the core is split
    # into two cores.
    members: dict[tuple[int, int], list[int]] = {}
    for cpu in online:
        members.setdefault((leader_of[cpu], node_of[cpu]), []).append(cpu)
    classes = _efficiency_classes(files, [cpus[0] for cpus in members.values()])
    caches = _dense(_leaders(files, online, (_l3_file(files, online[0]),)))
    cores = [
        Core(
            cpus=tuple(cpus),
            package=packages[cpus[0]],
            numa_node=node_of[cpus[0]],
            l3=caches.get(cpus[0]),
            efficiency=classes[cpus[0]],
        )
        for cpus in members.values()
    ]
    cores.sort(key=lambda c: (c.numa_node, c.package, -1 if c.l3 is None else c.l3, c.cpus[0]))
    return tuple(cores)


def _leaders(
    files: _KernelFiles, online: tuple[int, ...], names: tuple[str | None, ...]
) -> dict[int, int]:
    """Map each CPU to the lowest CPU of its group, which is a core, a package or a cache.

    The first valid file among ``names`` lists the CPUs of a group. Only the files of the first CPU
    in each group are read, because reading the files of 256 CPUs takes long.
    """
    present = set(online)
    leaders: dict[int, int] = {}
    for cpu in online:
        if cpu in leaders:
            continue
        for name in names:
            listed = name and files.cpu_list(f"{_CPU}/cpu{cpu}/{name}")
            if listed and cpu in listed:
                group = [c for c in listed if c in present and c not in leaders]
                leaders.update(dict.fromkeys(group, group[0]))
                break
    return leaders


def _core_leaders(
    files: _KernelFiles, online: tuple[int, ...], packages: dict[int, int]
) -> dict[int, int]:
    """Map each CPU to the lowest CPU of its core."""
    names = ("topology/core_cpus_list", "topology/thread_siblings_list")
    leaders = _leaders(files, online, names)
    by_number: dict[tuple[int, int | None], int] = {}
    for cpu in online:
        if cpu not in leaders:
            number = files.number(f"{_CPU}/cpu{cpu}/topology/core_id")
            core = (packages[cpu], number)
            leaders[cpu] = cpu if number is None else by_number.setdefault(core, cpu)
    return leaders


def _l3_file(files: _KernelFiles, cpu: int) -> str | None:
    """Return the name of the file that lists the CPUs of an L3 cache; None without L3 cache."""
    for index in reversed(files.numbered(f"{_CPU}/cpu{cpu}/cache", "index")):
        level = files.number(f"{_CPU}/cpu{cpu}/cache/index{index}/level")
        if (index if level is None else level) == 3:
            return f"cache/index{index}/shared_cpu_list"
    return None


def _packages(files: _KernelFiles, online: tuple[int, ...]) -> dict[int, int]:
    """Map each CPU to the number of its package (socket); 0 if the kernel reports no package."""
    names = ("topology/package_cpus_list", "topology/core_siblings_list")
    leaders = _leaders(files, online, names)
    leader_of = {cpu: leaders.get(cpu, cpu) for cpu in online}
    numbers = {
        leader: max(0, files.number(f"{_CPU}/cpu{leader}/topology/physical_package_id") or 0)
        for leader in set(leader_of.values())
    }
    return {cpu: numbers[leader] for cpu, leader in leader_of.items()}


def _efficiency_classes(files: _KernelFiles, cpus: list[int]) -> dict[int, int]:
    """Map each CPU to its efficiency class; 0 is the class of the slowest CPUs.

    The classes come from the CPU lists of Intel's hybrid processors or from the CPU capacities.
    """
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
    """Replace ranks by consecutive numbers in the same order: 2, 7, 7 becomes 0, 1, 1."""
    number = {rank: i for i, rank in enumerate(sorted(set(ranks.values())))}
    return {cpu: number[rank] for cpu, rank in ranks.items()}


# --- the kernel's files -------------------------------------------------------------------------


def _whole_number(text: str) -> int | None:
    """Return the number in ``text``; None if ``text`` is not a whole number of up to 15 digits."""
    return int(text) if _NUMBER.fullmatch(text) else None


class _KernelFiles:
    """Reads small kernel files below ``root``; the value of a missing or invalid file is None."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = str(root).rstrip("/")

    def text(self, path: str) -> str | None:
        try:
            return Path(f"{self._prefix}/{path}").read_text("utf-8", "replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        return _whole_number(self.text(path) or "")

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        return _cpu_list(self.text(path))

    def status_list(self, field: str) -> tuple[int, ...] | None:
        """Return the numbers in a field of ``proc/self/status``, such as ``Cpus_allowed_list``."""
        found = re.search(rf"^{field}:(.*)$", self.text("proc/self/status") or "", re.MULTILINE)
        return _cpu_list(found and found[1])

    def numbered(self, path: str, prefix: str) -> tuple[int, ...]:
        """Return the sorted numbers of the entries of a folder, such as 7 for ``cpu7``."""
        try:
            names = [entry.name for entry in Path(f"{self._prefix}/{path}").iterdir()]
        except OSError:
            return ()
        tails = (n.removeprefix(prefix) for n in names if n.startswith(prefix))
        return tuple(sorted(int(t) for t in tails if t.isascii() and t.isdigit() and len(t) < 9))


def _cpu_list(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else parse_cpu_list(text)
    except ValueError:
        return None


# --- control groups -----------------------------------------------------------------------------

# The folders in sys/fs/cgroup where systems mount each controller; "" is cgroup version 2.
_MOUNTS = {"": ("", "unified"), "cpu": ("cpu", "cpu,cpuacct"), "cpuset": ("cpuset",)}


def _group_folders(files: _KernelFiles, controller: str) -> list[str]:
    """Return the folders of this process's control group and of all its ancestors.

    The limits of a control group also apply to the groups below it. If a container does not mount
    the group that ``proc/self/cgroup`` names, the mount point is the container's own group.
    """
    lines = (files.text("proc/self/cgroup") or "").splitlines()
    named = [line.split(":", 2)[1:] for line in lines if line.count(":") > 1]
    groups = [(names, path) for names, path in named if controller in names.split(",")]
    folders = []
    for names, path in groups or [(controller, "/")]:
        steps = [step for step in path.split("/") if step not in ("", "..")]
        folders += [
            "/".join(filter(None, ("sys/fs/cgroup", mount, *steps[:depth])))
            for mount in dict.fromkeys((*_MOUNTS[controller], names))
            for depth in range(len(steps), -1, -1)
        ]
    return folders


def _cpu_quota(files: _KernelFiles) -> float | None:
    """Return the lowest CPU quota of the control groups, as a number of CPUs; None for no limit.

    The kernel's documentation describes CPU quotas in admin-guide/cgroup-v2.rst (cpu.max) and
    scheduler/sched-bwc.rst.
    """
    quotas = []
    for folder in _group_folders(files, ""):
        quota, _, period = (files.text(f"{folder}/cpu.max") or "").partition(" ")
        quotas.append(_ratio(quota, period))
    for folder in _group_folders(files, "cpu"):
        quota = files.text(f"{folder}/cpu.cfs_quota_us") or ""
        quotas.append(_ratio(quota, files.text(f"{folder}/cpu.cfs_period_us") or "100000"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _allowed(files: _KernelFiles, kind: str) -> list[tuple[int, ...]]:
    """Return the allowed CPUs (``cpus``) or NUMA nodes (``mems``) of each cpuset."""
    found = []
    for controller, effective in (
        ("", f"cpuset.{kind}.effective"),
        ("cpuset", f"cpuset.effective_{kind}"),
    ):
        for folder in _group_folders(files, controller):
            # The effective cpuset is read first, because the configured cpuset may be larger.
            lists = (files.cpu_list(f"{folder}/{n}") for n in (effective, f"cpuset.{kind}"))
            found.append(next((numbers for numbers in lists if numbers), ()))
    return [numbers for numbers in found if numbers]


def _ratio(quota: str, period: str) -> float | None:
    """Return a CPU quota divided by its period; None for ``max``, ``-1`` and invalid values."""
    used, length = _whole_number(quota) or 0, _whole_number(period) or 0
    return used / length if used > 0 and length > 0 else None
