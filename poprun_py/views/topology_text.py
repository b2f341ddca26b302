"""Topologies as text: PopRun's table, an elided table for narrow terminals, a tree, JSON.

Rules of the table: those of PopRun, reproduced character for character. Only text is made here;
nothing is printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import click

from poprun_py.hardware.reader import Machine
from poprun_py.hardware.sysfs import format_cpu_list
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.plan_file import plan_to_json
from poprun_py.planning.topology import Topology
from poprun_py.views.placement_picture import placement_picture

__all__ = ["core_pictures", "topology_json", "topology_table", "topology_tree"]

# An instance with more replicas than this shows them as one range.
_MAX_REPLICA_LINES = 16

_LABEL_WIDTH = 11
_TITLE = "poprun topology"


def topology_table(topology: Topology, *, max_width: int | None = None) -> str:
    """Return PopRun's topology table, without a final newline.

    Args:
        topology: what to draw.
        max_width: columns of the terminal; a wider table is elided in the middle. None: draw all.
    """
    table = _table(topology, range(topology.num_replicas), None)
    if max_width is None or len(table.split("\n", 2)[1]) <= max_width:
        return table
    return _elided(topology, max_width)


def _table(topology: Topology, replicas: Sequence[int], gap: int | None) -> str:
    """Draw the columns of ``replicas``; a column of dots follows position ``gap``."""
    columns: list[int | None] = list(replicas)
    if gap is not None:
        columns.insert(gap, None)
    leaf = max(len(str(topology.num_replicas - 1)) + 2, 5 if gap is not None else 0)
    width = len(columns) * leaf + len(columns) - 1
    inner = _LABEL_WIDTH + 1 + width
    local = topology.num_local_replicas
    hosts = [host.name for host in topology.hosts]
    per_host = topology.num_replicas // len(hosts)
    per_ild = topology.num_replicas // topology.num_ilds
    rows = (
        ("hosts", [None if r is None else r // per_host for r in columns], hosts),
        ("ILDs", [None if r is None else r // per_ild for r in columns], None),
        ("instances", [None if r is None else r // local for r in columns], None),
        ("replicas", columns, None),
    )
    divider = f"|{'-' * _LABEL_WIDTH}|{'-' * width}|"
    body = f"\n{divider}\n".join(
        f"| {label:<{_LABEL_WIDTH - 1}}|{_cells(indices, names, leaf)}|"
        for label, indices, names in rows
    )
    return "\n".join(
        (
            " " + "=" * inner,
            f"|{_centre(_TITLE, inner)}|",
            f"|{'=' * inner}|",
            body,
            " " + "-" * inner,
        )
    )


def _cells(indices: list[int | None], names: list[str] | None, leaf: int) -> str:
    """Join equal neighbours into one cell each."""
    cells: list[str] = []
    start = 0
    for end in range(1, len(indices) + 1):
        if end < len(indices) and indices[end] == indices[start]:
            continue
        span = end - start
        width = span * leaf + span - 1
        cells.append(_centre(_label(indices[start], names, width), width))
        start = end
    return "|".join(cells)


def _label(index: int | None, names: list[str] | None, width: int) -> str:
    """Return a cell's text; a host name that does not fit becomes its bracketed index."""
    if index is None:
        return "..."
    if names is None:
        return str(index)
    return names[index] if len(names[index]) <= width else f"[{index}]"


def _centre(text: str, width: int) -> str:
    left = max(0, (width - len(text)) // 2)
    return (" " * left + text).ljust(width)


def _elided(topology: Topology, max_width: int) -> str:
    """Draw as many first and last instances as fit into ``max_width``, dots between them."""
    leaf = max(len(str(topology.num_replicas - 1)) + 2, 5)
    fitting = max(2, (max_width - _LABEL_WIDTH - 3) // (leaf + 1) - 1)
    total = topology.num_replicas
    last = max(1, fitting // 3)
    first = max(1, fitting - last)
    shown = [*range(first), *range(total - last, total)]
    table = _table(topology, shown, first)
    instances, hosts = topology.num_instances, len(topology.hosts)
    note = (
        f"{total} replicas, {instances} instances, {hosts} host{'s' if hosts > 1 else ''}; "
        f"replicas {first} to {total - last - 1} not shown (write to a file or use "
        "--print-topology json for all)"
    )
    legend = _legend(topology, table)
    return "\n".join((table, note, *legend))


def _legend(topology: Topology, table: str) -> list[str]:
    """Explain the bracketed host indices that the table shows."""
    row = table.split("\n")[3]
    return [
        f"[{index}] = {host.name}"
        for index, host in enumerate(topology.hosts)
        if f"[{index}]" in row
    ]


# --- the tree -----------------------------------------------------------------------------------

_Paint = Callable[..., str]
_Tree = tuple[str, "list[_Tree]"]


def topology_tree(plan: LaunchPlan, *, colour: bool = False) -> str:
    """Return hosts > NUMA nodes > instances > replicas > IPUs, with CPUs and threads.

    Args:
        plan: what to draw.
        colour: whether to style it for a terminal.
    """
    paint = click.style if colour else _plain
    lines: list[str] = []
    for index, host in enumerate(plan.topology.hosts):
        mine = [p for p in plan.instances if p.instance.host_index == index]
        branches = [
            (_nodes_line(nodes, plan.machines[index], paint), [_instance(p, paint) for p in group])
            for nodes, group in groupby(mine, key=lambda p: p.placement.numa_nodes)
        ]
        lines.append(paint(host.name, bold=True))
        lines += _draw(branches)
    return "\n".join(lines)


def _plain(text: str, **_: object) -> str:
    return text


def _draw(branches: Sequence[_Tree], indent: str = "") -> Iterable[str]:
    for number, (line, children) in enumerate(branches):
        is_last = number == len(branches) - 1
        yield f"{indent}{'└─' if is_last else '├─'} {line}"
        yield from _draw(children, indent + ("   " if is_last else "│  "))


def _nodes_line(nodes: tuple[int, ...], machine: Machine | None, paint: _Paint) -> str:
    """Describe the NUMA nodes that a group of instances runs on."""
    if not nodes:
        return paint("any CPU", fg="yellow")
    name = f"NUMA node {nodes[0]}" if len(nodes) == 1 else f"NUMA nodes {format_cpu_list(nodes)}"
    own = [n for n in machine.numa_nodes if n.index in nodes] if machine is not None else []
    cpus = sorted(cpu for node in own for cpu in node.cpus)
    memory = sum(node.memory_bytes for node in own)
    details = [_cpus(cpus)] if cpus else []
    details += [f"{memory / 2**30:.1f} GiB"] if memory else []
    return paint(name, fg="yellow") + (f": {', '.join(details)}" if details else "")


def _instance(p: InstancePlan, paint: _Paint) -> _Tree:
    details = [_cpus(p.placement.cpus)] if p.placement.cpus else ["any CPU"]
    if p.placement.threads:
        details.append(f"{p.placement.threads} thread{'s' if p.placement.threads > 1 else ''}")
    details.append(f"ILD {p.instance.ild}")
    line = paint(f"instance {p.instance.index}", fg="green") + f": {', '.join(details)}"
    replicas, width = p.instance.replicas, len(p.instance.ipus) // len(p.instance.replicas)
    if len(replicas) > _MAX_REPLICA_LINES:
        return line, [(f"{_span('replica', replicas)}: {_span('IPU', p.instance.ipus)}", [])]
    return line, [
        (
            paint(f"replica {r}", fg="cyan")
            + f": {_span('IPU', range(r * width, (r + 1) * width))}",
            [],
        )
        for r in replicas
    ]


def _cpus(cpus: Sequence[int]) -> str:
    return f"CPU{'s' if len(cpus) > 1 else ''} {format_cpu_list(cpus)}"


def _span(noun: str, numbers: range) -> str:
    """Return ``IPU 3`` or ``IPUs 3-5``."""
    first, last = numbers.start, numbers.stop - 1
    return f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"


def core_pictures(plan: LaunchPlan) -> str:
    """Return a picture of every host: a cell for each core, with the instance that runs there."""
    pictures = []
    for index, (host, machine) in enumerate(zip(plan.topology.hosts, plan.machines, strict=True)):
        placements = [p.placement for p in plan.instances if p.instance.host_index == index]
        body = placement_picture(machine, placements) if machine is not None else "unknown machine"
        pictures.append(f"{host.name}:\n{body}")
    return "\n".join(pictures)


def topology_json(plan: LaunchPlan) -> str:
    """Return who is where as JSON: the plan without variables, command and options."""
    data = plan_to_json(plan)
    for key in ("command", "compact", "local", "machines", "program", "options"):
        del data[key]
    for instance in data["instances"]:
        del instance["env"], instance["user_env"], instance["kept_out"]
    return json.dumps(data, indent=2)
