"""Topologies as text: PopRun's table, an elided table for narrow terminals, cores, JSON.

Rules of the table: those of PopRun, reproduced character for character. Only text is made here;
nothing is printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from popdist_py.errors import counted
from poprun_py.machines.host_list import compress
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_file import plan_to_json
from poprun_py.planning.topology import Topology
from poprun_py.planning.views.placement_picture import placement_picture
from poprun_py.planning.views.plan_tree import instances_of, others, runs_of_equal_hosts
from poprun_py.planning.views.text_drawing import TextStyle, draw_tree

# A table that nobody asked for by name, and that no terminal limits.
UNASKED_WIDTH, UNASKED_REPLICAS = 120, 256
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
    domains = f", {topology.num_ilds} ILDs" if topology.num_ilds > 1 else ""
    note = (
        f"{counted(total, 'replica')}, {counted(instances, 'instance')}, {counted(hosts, 'host')}"
        f"{domains}; "
        f"replicas {first} to {total - last - 1} not shown (--print-topology yes to a file, or "
        "json, shows all)"
    )
    return "\n".join((table, note, *_ranges(topology), *_legend(topology, table)))


def _ranges(topology: Topology) -> list[str]:
    """Say in one line which instances every host has; nothing for a single host."""
    hosts, share = topology.hosts, topology.instances_per_host
    if len(hosts) == 1:
        return []
    total = topology.num_instances
    first, last = (
        (f"0-{share - 1}", f"{total - share}-{total - 1}") if share > 1 else ("0", f"{total - 1}")
    )
    each = counted(share, "instance") if share > 1 else "one instance"
    return [
        f"{compress([host.name for host in hosts])}: {each} each, from {first} on {hosts[0].name} "
        f"to {last} on {hosts[-1].name}"
    ]


def _legend(topology: Topology, table: str) -> list[str]:
    """Explain the bracketed host indices that the table shows."""
    row = table.split("\n")[3]
    return [
        f"[{index}] = {host.name}"
        for index, host in enumerate(topology.hosts)
        if f"[{index}]" in row
    ]


def core_pictures(plan: LaunchPlan, look: TextStyle) -> str:
    """Return a picture of every host: a cell for each core, with the instance that runs there.

    Hosts of a large job that look as the one before them are a line.
    """
    pictures = []
    for run in runs_of_equal_hosts(plan):
        machine, mine = plan.machines[run[0]], instances_of(plan, run[0])
        body = "unknown machine"
        if machine is not None:
            # The instances of a host follow one another.
            first = mine[0].instance.index if mine else 0
            placements = [p.placement for p in mine]
            body = placement_picture(machine, placements, first=first, look=look)
        name = plan.topology.hosts[run[0]].name
        pictures.append(f"{look.paint(f'{name}:', 'host')}\n{body}")
        pictures += [draw_tree(others(plan, run), look)] if len(run) > 1 else []
    return "\n".join(pictures)


def topology_json(plan: LaunchPlan) -> str:
    """Return who is where as JSON: the plan without variables, command and options."""
    data = plan_to_json(plan)
    for key in ("command", "compact", "local", "machines", "program", "options"):
        del data[key]
    for instance in data["instances"]:
        del instance["env"], instance["user_env"], instance["kept_out"]
    return json.dumps(data, indent=2)
