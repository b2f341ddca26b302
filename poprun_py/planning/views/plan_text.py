"""A plan as text, either as a tree of hosts and instances or as a map of each host's cores."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.display.formatting import bytes_text, numbered
from poprun_py.machines.machine import Machine
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.views.plan_tree import (
    LEGEND,
    CoreLabels,
    HostGroup,
    InstanceGroup,
    PlanTree,
)
from poprun_py.planning.views.text_drawing import Branch, TextStyle, draw_tree, wrapped

_MAP_WIDTH = 92


# --- the tree of hosts and instances ------------------------------------------------------------


def tree_text(tree: PlanTree, style: TextStyle) -> str:
    """Return the tree of hosts, NUMA nodes, instances and replicas, with CPUs, threads and IPUs.

    All replicas of an instance are on one line. A group of equal instances has one line. In a group
    of equal hosts, all hosts after the first are on one line.
    """
    branches = []
    for host in tree.hosts:
        nodes = tuple(
            _nodes(numbers, host.machine, list(group))
            for numbers, group in groupby(host.instances, key=lambda g: g.placement.numa_nodes)
        )
        branches.append(Branch(kind="host", name=host.name, children=nodes))
        branches += _others(host)
    return "\n".join(draw_tree(branch, style) for branch in branches)


def _others(host: HostGroup) -> list[Branch]:
    if host.others is None:
        return []
    return [Branch(kind="host", name=host.others.names, details=host.others.details())]


def _nodes(
    numbers: tuple[int, ...], machine: Machine | None, groups: list[InstanceGroup]
) -> Branch:
    children = tuple(map(_instances, groups))
    if not numbers:
        return Branch(kind="node", name="any CPU", children=children)
    nodes = [n for n in machine.numa_nodes if n.index in numbers] if machine is not None else []
    cpus = sorted(cpu for node in nodes for cpu in node.cpus)
    memory = sum(node.memory_bytes for node in nodes)
    return Branch(
        kind="node",
        name=numbered("NUMA node", numbers),
        details=_joined(cpus and numbered("CPU", cpus), memory and bytes_text(memory)),
        children=children,
    )


def _instances(group: InstanceGroup) -> Branch:
    placement = group.placement
    each = " each" if len(group.indices) > 1 else ""
    width = group.ipus_per_replica
    replicas = Branch(
        kind="replica",
        name=numbered("replica", group.replicas),
        details=_joined(numbered("IPU", group.ipus), width > 1 and f"{width} each"),
    )
    return Branch(
        kind="instance",
        name=numbered("instance", group.indices),
        details=_joined(
            numbered("CPU", placement.cpus) if placement.cpus else "any CPU",
            placement.threads and counted(placement.threads, "thread") + each,
            each and counted(group.replicas_each, "replica") + each,
            f"ILD {group.ild}",
        ),
        children=(replicas,),
    )


def _joined(*details: object) -> str:
    return ", ".join(str(detail) for detail in details if detail)


# --- the map of cores ---------------------------------------------------------------------------


def cores_text(tree: PlanTree, style: TextStyle) -> str:
    """Return a map of the cores of every host, with the instances that may run on each core.

    In a group of equal hosts, only the first host has a map. The names of the other hosts are on
    one line.
    """
    parts = []
    for host in tree.hosts:
        cores = "unknown machine"
        if host.machine is not None:
            cores = core_map(host.machine, host.placements, style)
        parts.append(f"{style.paint(f'{host.name}:', 'host')}\n{cores}")
        parts += [draw_tree(branch, style) for branch in _others(host)]
    return "\n".join(parts)


def core_map(
    machine: Machine, placements: Mapping[int, Placement], style: TextStyle | None = None
) -> str:
    """Return a row for each NUMA node with a cell for each core, then a line for each instance.

    A cell contains the index of the instance that may run on the core. ``|`` separates cores with
    different L3 caches. ``placements`` maps the indices of instances to their placements. If
    ``style`` is None, the map is not coloured, as for a file.
    """
    style = style or TextStyle()
    labels = CoreLabels(machine, placements)
    cells = {core: labels.of(core) for core in machine.cores}
    width = max(map(len, cells.values()))
    lines = []
    for node in machine.numa_nodes:
        cores = [core for core in machine.cores if core.numa_node == node.index]
        groups = [
            [cells[core].rjust(width) for core in group]
            for _, group in groupby(cores, key=lambda core: (core.package, core.l3))
        ]
        label = f"node {node.index:<3}"
        row, *more = _rows(groups, min(style.width or _MAP_WIDTH, _MAP_WIDTH) - len(f"{label} | "))
        lines.append(f"{style.paint(label, 'node')} | {row}")
        lines += [f"{' ' * len(label)} | {row}" for row in more]
    used = {sign: text for sign, text in LEGEND.items() if any(sign in c for c in cells.values())}
    if used:
        legend = ", ".join(f"{sign} {text}" for sign, text in used.items())
        lines += wrapped(f"({legend})", style.width)
    instances = (
        Branch(kind="instance", name=f"instance {index}", details=placement_text(placement))
        for index, placement in placements.items()
    )
    return "\n".join([*lines, *(draw_tree(instance, style) for instance in instances)])


def _rows(groups: list[list[str]], width: int) -> list[str]:
    """Arrange groups of cells in rows of at most ``width`` columns.

    A group is divided between rows only if it is wider than a row.
    """
    rows = [""]
    for group in groups or [["memory only"]]:
        whole = " ".join([*group, "|"])
        pieces = [whole] if len(whole) <= width else [*group, "|"]
        for piece in pieces:
            if rows[-1] and len(rows[-1]) + 1 + len(piece) > width:
                rows.append("")
            rows[-1] += f" {piece}" if rows[-1] else piece
    return rows


def placement_text(placement: Placement) -> str:
    """Return a placement as text, such as ``CPUs 0-7,16-23; memory of node 0; 8 threads``."""
    cpus = numbered("CPU", placement.cpus) if placement.cpus else "any CPU"
    memory = placement.memory_nodes
    where = f"memory of {numbered('node', memory)}" if memory else "any memory"
    return f"{cpus}; {where}; {counted(placement.threads, 'thread')}"
