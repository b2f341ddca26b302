"""PopRun's topology table in exactly PopRun's form, and a shortened form for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.display.formatting import ranges_text
from poprun_py.machines.host_list import compress
from poprun_py.planning.topology import Topology

# If the output is not a terminal and --print-topology was not given, the table of a job with more
# than ``UNASKED_REPLICAS`` replicas is shortened to ``UNASKED_WIDTH`` columns.
UNASKED_WIDTH, UNASKED_REPLICAS = 120, 256
_LABEL_WIDTH = 11
_TITLE = "poprun topology"


def topology_table(topology: Topology, *, max_width: int | None = None) -> str:
    """Return PopRun's topology table, without a final newline.

    If the table is wider than ``max_width`` columns, replicas in the middle are left out.
    """
    table = _table(topology, range(topology.num_replicas), None)
    if max_width is None or len(table.split("\n", 2)[1]) <= max_width:
        return table
    return _elided(topology, max_width)


def _table(topology: Topology, replicas: Sequence[int], gap: int | None) -> str:
    """Draw the table with a column for each replica, and a column of dots at position ``gap``."""
    columns: list[int | None] = list(replicas)
    if gap is not None:
        columns.insert(gap, None)
    column_width = max(len(str(topology.num_replicas - 1)) + 2, 5 if gap is not None else 0)
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
        indices = [None if replica is None else replica // count for replica in columns]
        cells = _cells(indices, hosts if label == "hosts" else None, column_width)
        rows.append(f"| {label:<{_LABEL_WIDTH - 1}}|{cells}|")
    return "\n".join(
        (
            " " + "=" * inner,
            f"|{_centre(_TITLE, inner)}|",
            f"|{'=' * inner}|",
            f"\n|{'-' * _LABEL_WIDTH}|{'-' * width}|\n".join(rows),
            " " + "-" * inner,
        )
    )


def _cells(indices: list[int | None], names: list[str] | None, column_width: int) -> str:
    """Return the cells of a row; neighbouring columns with equal indices share a cell."""
    cells = []
    for index, columns in groupby(indices):
        width = len(list(columns)) * (column_width + 1) - 1
        cells.append(_centre(_label(index, names, width), width))
    return "|".join(cells)


def _label(index: int | None, names: list[str] | None, width: int) -> str:
    """Return the text of a cell. A host name that is too long is replaced by ``[INDEX]``."""
    if index is None:
        return "..."
    if names is None:
        return str(index)
    return names[index] if len(names[index]) <= width else f"[{index}]"


def _centre(text: str, width: int) -> str:
    left = max(0, (width - len(text)) // 2)
    return (" " * left + text).ljust(width)


def _elided(topology: Topology, max_width: int) -> str:
    """Draw as many replicas as fit; a column of dots stands for the replicas left out."""
    column_width = max(len(str(topology.num_replicas - 1)) + 2, 5)
    fitting = max(2, (max_width - _LABEL_WIDTH - 3) // (column_width + 1) - 1)
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
    """Return a line about the instances of each host; an empty list if there is only one host."""
    hosts, share = topology.hosts, topology.instances_per_host
    if len(hosts) == 1:
        return []
    total = topology.num_instances
    first, last = ranges_text(range(share)), ranges_text(range(total - share, total))
    each = counted(share, "instance") if share > 1 else "one instance"
    return [
        f"{compress([host.name for host in hosts])}: {each} each, from {first} on {hosts[0].name} "
        f"to {last} on {hosts[-1].name}"
    ]


def _legend(topology: Topology, table: str) -> list[str]:
    """Return lines that tell which host each index in brackets stands for."""
    row = table.split("\n")[3]
    return [
        f"[{index}] = {host.name}"
        for index, host in enumerate(topology.hosts)
        if f"[{index}]" in row
    ]
