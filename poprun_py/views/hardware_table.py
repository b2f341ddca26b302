"""A machine as a table for people: what ``--print-hardware`` shows. Only text is made here."""

from __future__ import annotations

import io

from poprun_py.hardware.reader import Core, Machine, NumaNode
from poprun_py.hardware.sysfs import format_cpu_list

__all__ = ["hardware_table", "memory_size"]

_WIDTH = 100


def hardware_table(machine: Machine) -> str:
    """Return the NUMA nodes of ``machine`` as a table below a summary, without a final newline."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ASCII2, pad_edge=False)
    for name in ("NUMA node", "package", "cores", "CPUs", "L3 groups", "memory", "distances"):
        table.add_column(name, overflow="fold")
    for node in machine.numa_nodes:
        table.add_row(*_row(machine, node))
    out = io.StringIO()
    # Wide enough for any host: a file or a pipe gets whole lines.
    width = max(_WIDTH, 60 + 6 * len(machine.numa_nodes))
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
    lines = [*_summary(machine), *out.getvalue().splitlines()]
    return "\n".join(line.rstrip() for line in lines)


def memory_size(count: int) -> str:
    """Return a number of bytes as people say it: ``16.0 GiB``; ``-`` for none."""
    if count == 0:
        return "-"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _summary(machine: Machine) -> list[str]:
    cpus = sum(len(core.cpus) for core in machine.cores)
    packages = {core.package for core in machine.cores}
    lines = [
        f"{_count(len(packages), 'package')}, {_count(len(machine.numa_nodes), 'NUMA node')}, "
        f"{_count(len(machine.cores), 'core')}, {_count(cpus, 'CPU')}, "
        f"{memory_size(sum(node.memory_bytes for node in machine.numa_nodes))} of memory"
    ]
    classes = sorted({core.efficiency for core in machine.cores}, reverse=True)
    if len(classes) > 1:
        numbers = [sum(core.efficiency == c for core in machine.cores) for c in classes]
        lines.append(f"cores of {len(classes)} speeds, fastest first: {_joined(numbers)}")
    if len(machine.allowed_cpus) < cpus:
        allowed = format_cpu_list(machine.allowed_cpus)
        lines.append(f"allowed: {_count(len(machine.allowed_cpus), 'CPU')} ({allowed})")
    if len(machine.allowed_memory_nodes) < len(machine.numa_nodes):
        nodes = format_cpu_list(machine.allowed_memory_nodes)
        lines.append(f"allowed: memory of NUMA nodes {nodes}")
    if machine.cpu_quota is not None:
        lines.append(f"CPU quota: {machine.cpu_quota:g} CPUs, used as {machine.quota_cpus}")
    return lines


def _row(machine: Machine, node: NumaNode) -> tuple[str, ...]:
    cores = [core for core in machine.cores if core.numa_node == node.index]
    return (
        str(node.index),
        format_cpu_list([core.package for core in cores]) or "-",
        _core_counts(cores),
        format_cpu_list(node.cpus) or "-",
        str(len({core.l3 for core in cores if core.l3 is not None}) or "-"),
        memory_size(node.memory_bytes),
        " ".join(map(str, node.distances)),
    )


def _core_counts(cores: list[Core]) -> str:
    """Return the number of cores, by hardware threads of a core: ``8`` or ``6 x 2 + 8 x 1``."""
    sizes = [len(core.cpus) for core in cores]
    counts = {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}
    if set(counts) <= {1}:
        return str(len(cores))
    return " + ".join(f"{count} x {size}" for size, count in counts.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _joined(numbers: list[int]) -> str:
    return " + ".join(map(str, numbers))
