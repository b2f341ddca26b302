"""A placement as a picture: the cores of a host, and whose they are. Only text is made here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from poprun_py.hardware.reader import Core, Machine
from poprun_py.hardware.sysfs import format_cpu_list
from poprun_py.planning.cpu_placement import Placement

__all__ = ["placement_line", "placement_picture"]

_WIDTH = 92
_IDLE, _FORBIDDEN, _MANY, _SLOW = ".", "x", "*", "'"
_LEGEND = {
    _IDLE: "no instance",
    _FORBIDDEN: "not allowed",
    _MANY: "several instances",
    _SLOW: "slower core",
}
_MOST_NAMED = 2


def placement_picture(machine: Machine, placements: Sequence[Placement]) -> str:
    """Return one row for each NUMA node with a cell for each core, then a line for each instance.

    A cell holds the index of the instance that may run on the core; ``|`` separates L3 groups.
    Without a final newline.
    """
    owners: dict[int, list[int]] = {}
    for index, placement in enumerate(placements):
        for cpu in placement.cpus or machine.allowed_cpus:
            owners.setdefault(cpu, []).append(index)
    slowest_of_several = len({core.efficiency for core in machine.cores}) > 1
    fastest = max(core.efficiency for core in machine.cores)
    cells: dict[Core, str] = {}
    for core in machine.cores:
        slow = _SLOW if slowest_of_several and core.efficiency < fastest else ""
        cells[core] = _cell(machine, core, owners) + slow
    width = max(map(len, cells.values()))
    lines = []
    for node in machine.numa_nodes:
        own = [core for core in machine.cores if core.numa_node == node.index]
        groups = [
            " ".join(cells[core].rjust(width) for core in group)
            for _, group in groupby(own, key=lambda core: (core.package, core.l3))
        ]
        lines += _wrapped(f"node {node.index:<3}", groups or ["memory only"])
    used = {mark: text for mark, text in _LEGEND.items() if any(mark in c for c in cells.values())}
    if used:
        lines.append("(" + ", ".join(f"{mark} {text}" for mark, text in used.items()) + ")")
    lines += [f"instance {i}: {placement_line(p)}" for i, p in enumerate(placements)]
    return "\n".join(lines)


def placement_line(placement: Placement) -> str:
    """Return a placement in a line: ``CPUs 0-7,16-23; memory of node 0; 8 threads``."""
    cpus = f"CPUs {format_cpu_list(placement.cpus)}" if placement.cpus else "any CPU"
    memory = placement.memory_nodes
    where = (
        f"nodes {format_cpu_list(memory)}" if len(memory) > 1 else f"node {memory and memory[0]}"
    )
    threads = f"{placement.threads} thread{'' if placement.threads == 1 else 's'}"
    return f"{cpus}; {f'memory of {where}' if memory else 'any memory'}; {threads}"


def _cell(machine: Machine, core: Core, owners: dict[int, list[int]]) -> str:
    if not machine.allowed_cpus.intersection(core.cpus):
        return _FORBIDDEN
    indices = sorted({index for cpu in core.cpus for index in owners.get(cpu, ())})
    if len(indices) > _MOST_NAMED:
        return _MANY
    return "/".join(map(str, indices)) or _IDLE


def _wrapped(label: str, groups: list[str]) -> list[str]:
    """Return the groups in rows of limited width, the label before the first."""
    rows = [""]
    for group in groups:
        if len(rows[-1]) + len(group) + len(label) > _WIDTH and rows[-1]:
            rows.append("")
        rows[-1] += f" {group} |"
    return [f"{label if i == 0 else ' ' * len(label)} |{row}" for i, row in enumerate(rows)]
