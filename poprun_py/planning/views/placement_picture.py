"""A placement as a picture: the cores of a host, and whose they are. Only text is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.machines.machine import Core, Machine
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.views.text_drawing import Branch, TextStyle, draw_tree, wrapped
from poprun_py.texts import numbered

_WIDTH = 92
_IDLE, _FORBIDDEN, _MANY, _SLOW = ".", "x", "*", "'"
# What stands in the cell of a core in place of an index, or behind one.
LEGEND = {
    _IDLE: "no instance",
    _FORBIDDEN: "not allowed",
    _MANY: "several instances",
    _SLOW: "slower core",
}
_MOST_NAMED = 2


def placement_picture(
    machine: Machine,
    placements: Sequence[Placement],
    *,
    first: int = 0,
    look: TextStyle | None = None,
) -> str:
    """Return one row for each NUMA node with a cell for each core, then a line for each instance.

    A cell holds the index of the instance that may run on the core; ``|`` separates L3 groups.
    Without a final newline.

    Args:
        machine: the host.
        placements: those of the host's instances.
        first: the index of the first of them in the job.
        look: how to draw it; as for a file, if it is left out.
    """
    look = look or TextStyle()
    indexed = dict(enumerate(placements, first))
    marks = CoreMarks(machine, indexed)
    cells = {core: marks.of(core) for core in machine.cores}
    width = max(map(len, cells.values()))
    lines = []
    for node in machine.numa_nodes:
        own = [core for core in machine.cores if core.numa_node == node.index]
        groups = [
            [cells[core].rjust(width) for core in group]
            for _, group in groupby(own, key=lambda core: (core.package, core.l3))
        ]
        label = f"node {node.index:<3}"
        row, *more = _rows(groups, min(look.width or _WIDTH, _WIDTH) - len(f"{label} | "))
        lines.append(f"{look.paint(label, 'node')} | {row}")
        lines += [f"{' ' * len(label)} | {row}" for row in more]
    used = {mark: text for mark, text in LEGEND.items() if any(mark in c for c in cells.values())}
    if used:
        legend = ", ".join(f"{mark} {text}" for mark, text in used.items())
        lines += wrapped(f"({legend})", look.width)
    instances = (
        Branch(kind="instance", name=f"instance {index}", details=placement_line(placement))
        for index, placement in indexed.items()
    )
    return "\n".join([*lines, *(draw_tree(instance, look) for instance in instances)])


class CoreMarks:
    """What stands in the cells of a host's cores: whose they are.

    Args:
        machine: the host.
        placements: those of its instances, by their indices in the job.
    """

    def __init__(self, machine: Machine, placements: Mapping[int, Placement]) -> None:
        self._allowed = machine.allowed_cpus
        self._fastest = max(core.efficiency for core in machine.cores)
        self._owners: dict[int, list[int]] = {}
        for index, placement in placements.items():
            for cpu in placement.cpus or machine.allowed_cpus:
                self._owners.setdefault(cpu, []).append(index)

    def of(self, core: Core) -> str:
        """Return the mark of a core, or of some of its threads: ``3``, ``0/4``, or a sign."""
        return self._owner(core) + (_SLOW if core.efficiency < self._fastest else "")

    def _owner(self, core: Core) -> str:
        if not self._allowed.intersection(core.cpus):
            return _FORBIDDEN
        indices = sorted({index for cpu in core.cpus for index in self._owners.get(cpu, ())})
        if len(indices) > _MOST_NAMED:
            return _MANY
        return "/".join(map(str, indices)) or _IDLE


def placement_line(placement: Placement) -> str:
    """Return a placement in a line: ``CPUs 0-7,16-23; memory of node 0; 8 threads``."""
    cpus = numbered("CPU", placement.cpus) if placement.cpus else "any CPU"
    memory = placement.memory_nodes
    where = f"memory of {numbered('node', memory)}" if memory else "any memory"
    return f"{cpus}; {where}; {counted(placement.threads, 'thread')}"


def _rows(groups: list[list[str]], width: int) -> list[str]:
    """Return the groups in rows of limited width; only one that fits into no row is broken."""
    rows = [""]
    for group in groups or [["memory only"]]:
        whole = " ".join([*group, "|"])
        pieces = [whole] if len(whole) <= width else [*group, "|"]
        for piece in pieces:
            if rows[-1] and len(rows[-1]) + 1 + len(piece) > width:
                rows.append("")
            rows[-1] += f" {piece}" if rows[-1] else piece
    return rows
