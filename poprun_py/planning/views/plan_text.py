"""A launch plan as text: a tree of hosts, a map of their cores, and PopRun's topology table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.display.formatting import bytes_text, numbered, ranges_text
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Machine
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.instances_on_hosts import Topology
from poprun_py.planning.views.plan_tree import (
    LEGEND,
    HostGroup,
    InstanceGroup,
    PlanTree,
    cache_groups,
    core_labels,
)
from poprun_py.planning.views.text_drawing import Branch, TextStyle, draw_tree, wrapped

_MAP_WIDTH = 92
# If the user did not give --print-topology and the output is not a terminal, the topology table of
# a job with more than ``UNASKED_REPLICAS`` replicas is shortened to ``UNASKED_WIDTH`` columns.
UNASKED_WIDTH, UNASKED_REPLICAS = 120, 256
_LABEL_WIDTH = 11
_TABLE_TITLE = "poprun topology"


# --- the tree of hosts and instances ------------------------------------------------------------


def tree_text(tree: PlanTree, style: TextStyle) -> str:
    """Return the tree of hosts, NUMA nodes, instances and replicas, with CPUs, threads and IPUs.

    A group of equal instances has one line. In a group of equal hosts, all hosts but the first
    share one line.
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
    if not host.others:
        return []
    return [Branch(kind="host", name=host.others, details=host.others_details())]


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
    """Return maps of the cores of the hosts, with one map for each group of equal hosts."""
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
    """Return a map of a host's cores, followed by a line for each instance.

    The map has a row for each NUMA node and a cell for each core. A cell contains the indices of
    the instances that may run on the core. Cores with different L3 caches are separated by ``|``.
    ``placements`` maps the indices of instances to their placements. If ``style`` is None, the map
    has no colours.
    """
    style = style or TextStyle()
    label_of = core_labels(machine, placements)
    cells = {core: label_of(core) for core in machine.cores}
    width = max(map(len, cells.values()))
    lines = []
    for node in machine.numa_nodes:
        groups = [
            [cells[core].rjust(width) for core in group] for group in cache_groups(machine, node)
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

    If a group of cells is wider than a row, the group is divided between rows.
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
    """Return the placement of an instance as text: ``CPUs 0-7; memory of node 0; 8 threads``."""
    cpus = numbered("CPU", placement.cpus) if placement.cpus else "any CPU"
    memory = placement.memory_nodes
    where = f"memory of {numbered('node', memory)}" if memory else "any memory"
    return f"{cpus}; {where}; {counted(placement.threads, 'thread')}"


# --- PopRun's topology table -------------------------------------------------------------------


def topology_table(topology: Topology, *, max_width: int | None = None) -> str:
    """Return a topology table like PopRun's, without a final newline.

    If the table is wider than ``max_width`` columns, replicas in the middle of the table are left
    out.
    """
    table = _drawn_table(topology, list(range(topology.num_replicas)))
    if max_width is None or len(table.split("\n", 2)[1]) <= max_width:
        return table
    return _shortened_table(topology, max_width)


def _drawn_table(topology: Topology, columns: Sequence[int | None]) -> str:
    """Draw PopRun's topology table with a column for each replica, or dots for None in ``columns``.

    Neighbouring replicas of the same host, IPU-Link domain or instance share a cell. If the name of
    a host is too long for its cell, the cell contains the index of the host.
    """
    column_width = max(len(str(topology.num_replicas - 1)) + 2, 5 if None in columns else 0)
    width = len(columns) * (column_width + 1) - 1
    inner = _LABEL_WIDTH + 1 + width
    hosts = [host.name for host in topology.hosts]
    replicas_of = {
        "hosts": topology.num_replicas // len(hosts),
        "ILDs": topology.num_replicas // topology.num_ilds,
        "instances": topology.num_local_replicas,
        "replicas": 1,
    }
    rows = []
    for label, count in replicas_of.items():
        cells = []
        indices = (None if replica is None else replica // count for replica in columns)
        for index, same in groupby(indices):
            room = len(list(same)) * (column_width + 1) - 1
            text = "..." if index is None else str(index)
            if label == "hosts" and index is not None:
                text = hosts[index] if len(hosts[index]) <= room else f"[{index}]"
            cells.append(f"{text:^{room}}")
        rows.append(f"| {label:<{_LABEL_WIDTH - 1}}|{'|'.join(cells)}|")
    return "\n".join(
        (
            " " + "=" * inner,
            f"|{_TABLE_TITLE:^{inner}}|",
            f"|{'=' * inner}|",
            f"\n|{'-' * _LABEL_WIDTH}|{'-' * width}|\n".join(rows),
            " " + "-" * inner,
        )
    )


def _shortened_table(topology: Topology, max_width: int) -> str:
    """Draw the topology table of the first and last replicas, with notes about all replicas."""
    column_width = max(len(str(topology.num_replicas - 1)) + 2, 5)
    fitting = max(2, (max_width - _LABEL_WIDTH - 3) // (column_width + 1) - 1)
    total, hosts, share = topology.num_replicas, topology.hosts, topology.instances_per_host
    last = max(1, fitting // 3)
    first = max(1, fitting - last)
    table = _drawn_table(topology, [*range(first), None, *range(total - last, total)])
    instances = topology.num_instances
    domains = f", {topology.num_ilds} ILDs" if topology.num_ilds > 1 else ""
    lines = [
        table,
        f"{counted(total, 'replica')}, {counted(instances, 'instance')}, "
        f"{counted(len(hosts), 'host')}{domains}; replicas {first} to {total - last - 1} are not "
        "shown (all are shown by --print-topology yes in a file, and by --print-topology json)",
    ]
    if len(hosts) > 1:
        each = counted(share, "instance") if share > 1 else "one instance"
        lines.append(
            f"{compress([host.name for host in hosts])}: {each} each, from "
            f"{ranges_text(range(share))} on {hosts[0].name} to "
            f"{ranges_text(range(instances - share, instances))} on {hosts[-1].name}"
        )
    row = table.split("\n")[3]
    names = (f"[{index}] = {host.name}" for index, host in enumerate(hosts) if f"[{index}]" in row)
    return "\n".join([*lines, *names])
