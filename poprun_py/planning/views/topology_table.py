"""PopRun's topology table, reproduced character for character, and a short form for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from popdist_py.errors import counted
from poprun_py.machines.host_list import compress
from poprun_py.planning.topology import Topology

# Without a terminal, the table of a job with more replicas than this is elided to this width,
# unless --print-topology asks for the table.
UNASKED_WIDTH, UNASKED_REPLICAS = 120, 256
_LABEL_WIDTH = 11
_TITLE = "poprun topology"


def topology_table(topology: Topology, *, max_width: int | None = None) -> str:
    """Return PopRun's topology table, without a final newline.

    A table that is wider than ``max_width`` columns is elided in the middle.
    """
    table = _table(topology, range(topology.num_replicas), None)
    if max_width is None or len(table.split("\n", 2)[1]) <= max_width:
        return table
    return _elided(topology, max_width)


def _table(topology: Topology, replicas: Sequence[int], gap: int | None) -> str:
    """Draw the columns of ``replicas``, with a column of dots at position ``gap``."""
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
    """Join neighbouring columns with equal indices into one cell."""
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
    """Return the text of a cell; a host name that is too long becomes an index in brackets."""
    if index is None:
        return "..."
    if names is None:
        return str(index)
    return names[index] if len(names[index]) <= width else f"[{index}]"


def _centre(text: str, width: int) -> str:
    left = max(0, (width - len(text)) // 2)
    return (" " * left + text).ljust(width)


def _elided(topology: Topology, max_width: int) -> str:
    """Draw as much of the table as fits: the first and the last replicas, with dots between."""
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
    """Return a line with the instances of each host; no line if there is only one host."""
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
    """Return lines that explain the host indices in brackets."""
    row = table.split("\n")[3]
    return [
        f"[{index}] = {host.name}"
        for index, host in enumerate(topology.hosts)
        if f"[{index}]" in row
    ]
