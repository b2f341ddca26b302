"""A machine as a table for people: what ``--print-hardware`` shows. Only text is made here."""

from __future__ import annotations

from popdist_py.errors import counted
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.planning.views.text_drawing import PALETTE, Branch, TextStyle, draw_tree, wrapped
from poprun_py.text_tables import rich_lines
from poprun_py.texts import bytes_text, numbered, ranges_text

_NAME = "NUMA node"
_COLUMNS = (_NAME, "package", "cores", "CPUs", "L3 groups", "memory", "distances")


def hardware_table(machine: Machine, look: TextStyle | None = None) -> str:
    """Return the NUMA nodes of ``machine`` below a summary, without a final newline.

    They are a table in the lines and colours of the topology's tree; on a terminal that is too
    narrow for it, a tree.

    Args:
        machine: what to show.
        look: how to draw it; as for a file, if it is left out.
    """
    look = look or TextStyle()
    summary = [line for text in machine_summary(machine) for line in wrapped(text, look.width)]
    nodes = [dict(zip(_COLUMNS, _row(machine, node), strict=True)) for node in machine.numa_nodes]
    return "\n".join([*summary, _table(nodes, look) or _tree(nodes, look)])


def _table(nodes: list[dict[str, str]], look: TextStyle) -> str:
    """Return the table; nothing if the reader has no room for it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SQUARE if look.box_lines else box.ASCII2)
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, style=PALETTE["node"] if name == _NAME else None)
    for node in nodes:
        table.add_row(*node.values())
    if look.width is not None and len(rich_lines(table)[0]) > look.width:
        return ""
    return "\n".join(rich_lines(table, colour=look.colour))


def _tree(nodes: list[dict[str, str]], look: TextStyle) -> str:
    """Return the rows of the table as branches of a tree, which takes less room."""
    branches = tuple(
        Branch(
            kind="node",
            name=f"{_NAME} {node[_NAME]}",
            details=", ".join(
                f"{name} {text}" for name, text in node.items() if name != _NAME and text != "-"
            ),
        )
        for node in nodes
    )
    return draw_tree(Branch(kind="host", name=f"{_NAME}s", children=branches), look)


def machine_summary(machine: Machine) -> list[str]:
    """Return what there is of a machine, and what of it may be used, in lines."""
    cpus = sum(len(core.cpus) for core in machine.cores)
    packages = {core.package for core in machine.cores}
    lines = [
        f"{counted(len(packages), 'package')}, {counted(len(machine.numa_nodes), 'NUMA node')}, "
        f"{counted(len(machine.cores), 'core')}, {counted(cpus, 'CPU')}, "
        f"{_memory(sum(node.memory_bytes for node in machine.numa_nodes))} of memory"
    ]
    classes = sorted({core.efficiency for core in machine.cores}, reverse=True)
    if len(classes) > 1:
        numbers = [sum(core.efficiency == c for core in machine.cores) for c in classes]
        lines.append(f"cores of {len(classes)} speeds, fastest first: {_joined(numbers)}")
    if len(machine.allowed_cpus) < cpus:
        allowed = ranges_text(machine.allowed_cpus)
        lines.append(f"allowed: {counted(len(machine.allowed_cpus), 'CPU')} ({allowed})")
    if len(machine.allowed_memory_nodes) < len(machine.numa_nodes):
        lines.append(f"allowed: memory of {numbered('NUMA node', machine.allowed_memory_nodes)}")
    if machine.cpu_quota is not None:
        quota = counted(machine.cpu_quota, "CPU", "g")
        lines.append(f"CPU quota: {quota}, used as {machine.quota_cpus}")
    return lines


def _row(machine: Machine, node: NumaNode) -> tuple[str, ...]:
    cores = [core for core in machine.cores if core.numa_node == node.index]
    return (
        str(node.index),
        ranges_text([core.package for core in cores]) or "-",
        _core_counts(cores),
        ranges_text(node.cpus) or "-",
        str(len({core.l3 for core in cores if core.l3 is not None}) or "-"),
        _memory(node.memory_bytes),
        " ".join(map(str, node.distances)),
    )


def _core_counts(cores: list[Core]) -> str:
    """Return the number of cores, by hardware threads of a core: ``8`` or ``6 x 2 + 8 x 1``."""
    sizes = [len(core.cpus) for core in cores]
    counts = {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}
    if set(counts) <= {1}:
        return str(len(cores))
    return " + ".join(f"{count} x {size}" for size, count in counts.items())


def _memory(count: int) -> str:
    return bytes_text(count) if count else "-"


def _joined(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))
