"""Tables of the hardware of hosts (``--print-hardware``) and of the checks of ``--check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popdist_py.errors import counted
from poprun_py.display.formatting import bytes_text, numbered, ranges_text
from poprun_py.display.tables import rich_lines
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.planning.views.text_drawing import (
    PALETTE,
    Branch,
    TextStyle,
    draw_tree,
    wrapped,
)

if TYPE_CHECKING:
    from rich.text import Text

    from poprun_py.machines.host_checks import Check, HostChecks

_NAME = "NUMA node"


# --- table of a host's hardware -----------------------------------------------------------------


def hardware_table(machine: Machine, style: TextStyle | None = None) -> str:
    """Return a summary of a machine and a table of its NUMA nodes, without a final newline.

    If the terminal is too narrow for the table of NUMA nodes, the NUMA nodes are drawn as a tree.
    If ``style`` is None, the table has no colours, and long lines are not broken.
    """
    style = style or TextStyle()
    summary = [line for text in machine_summary(machine) for line in wrapped(text, style.width)]
    nodes = [_row(machine, node) for node in machine.numa_nodes]
    return "\n".join([*summary, _table(nodes, style) or _tree(nodes, style)])


def _table(nodes: list[dict[str, str]], style: TextStyle) -> str:
    """Return the table of NUMA nodes; empty if the table is too wide for the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SQUARE if style.box_lines else box.ASCII2)
    for name in nodes[0]:
        table.add_column(name, no_wrap=True, style=PALETTE["node"] if name == _NAME else None)
    for node in nodes:
        table.add_row(*node.values())
    if style.width is not None and len(rich_lines(table)[0]) > style.width:
        return ""
    return "\n".join(rich_lines(table, colour=style.colour))


def _tree(nodes: list[dict[str, str]], style: TextStyle) -> str:
    branches = []
    for node in nodes:
        facts = (f"{key} {text}" for key, text in node.items() if key != _NAME and text != "-")
        name = f"{_NAME} {node[_NAME]}"
        branches.append(Branch(kind="node", name=name, details=", ".join(facts)))
    return draw_tree(Branch(kind="host", name=f"{_NAME}s", children=tuple(branches)), style)


def machine_summary(machine: Machine) -> list[str]:
    """Return lines about the CPUs and memory of a machine, and about those that may be used."""
    cpus = sum(len(core.cpus) for core in machine.cores)
    packages = {core.package for core in machine.cores}
    lines = [
        f"{counted(len(packages), 'package')}, {counted(len(machine.numa_nodes), 'NUMA node')}, "
        f"{counted(len(machine.cores), 'core')}, {counted(cpus, 'CPU')}, "
        f"{_memory(sum(node.memory_bytes for node in machine.numa_nodes))} of memory"
    ]
    classes = sorted({core.efficiency for core in machine.cores}, reverse=True)
    if len(classes) > 1:
        numbers = (sum(core.efficiency == c for core in machine.cores) for c in classes)
        counts = " + ".join(map(str, numbers))
        lines.append(f"cores of {len(classes)} speeds, fastest first: {counts}")
    if len(machine.allowed_cpus) < cpus:
        allowed = ranges_text(machine.allowed_cpus)
        lines.append(f"allowed: {counted(len(machine.allowed_cpus), 'CPU')} ({allowed})")
    if len(machine.allowed_memory_nodes) < len(machine.numa_nodes):
        lines.append(f"allowed: memory of {numbered('NUMA node', machine.allowed_memory_nodes)}")
    if machine.cpu_quota is not None:
        quota = counted(machine.cpu_quota, "CPU", "g")
        lines.append(f"CPU quota: {quota}, used as {machine.quota_cpus}")
    return lines


def _row(machine: Machine, node: NumaNode) -> dict[str, str]:
    cores = [core for core in machine.cores if core.numa_node == node.index]
    return {
        _NAME: str(node.index),
        "package": ranges_text([core.package for core in cores]) or "-",
        "cores": _core_counts(cores),
        "CPUs": ranges_text(node.cpus) or "-",
        "L3 groups": str(len({core.l3 for core in cores if core.l3 is not None}) or "-"),
        "memory": _memory(node.memory_bytes),
        "distances": " ".join(map(str, node.distances)),
    }


def _core_counts(cores: list[Core]) -> str:
    """Return the number of cores as text: ``6 x 2`` for six cores with two threads each."""
    sizes = [len(core.cpus) for core in cores]
    counts = {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}
    if set(counts) <= {1}:
        return str(len(cores))
    return " + ".join(f"{count} x {size}" for size, count in counts.items())


def _memory(count: int) -> str:
    return bytes_text(count) if count else "-"


# --- table of the checks of hosts ---------------------------------------------------------------


def check_table(checked: HostChecks, *, colour: bool = False) -> str:
    """Return the table of ``--check`` and a hint for each failed check, without a final newline.

    The table has a row for each check, and a column for each group of hosts with equal results.
    Failed checks are marked with ``!``. If ``colour`` is True, failed checks are red.
    """
    hints = [
        f"{compress(names)}: {check.problem}"
        for checks, names in checked.groups.items()
        for check in checks
        if check.problem
    ]
    sections = [_check_grid(checked, colour), "\n".join(hints), checked.network]
    return "\n\n".join(section for section in sections if section)


def _check_grid(checked: HostChecks, colour: bool) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    # In a plain string such as "node[0-3]", the library rich would interpret the brackets as
    # markup.
    table.add_row("", *(Text(f"  {compress(names)}") for names in checked.groups.values()))
    columns = [{check.name: check for check in checks} for checks in checked.groups]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(Text(name), *(_cell(column.get(name)) for column in columns))
    return "\n".join(rich_lines(table, colour=colour))


def _cell(check: Check | None) -> Text:
    from rich.text import Text

    if check is None:
        return Text("  ?")
    return Text(f"! {check.text}", style="red") if check.problem else Text(f"  {check.text}")
