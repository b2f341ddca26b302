"""A plan as a tree: hosts, NUMA nodes, instances, replicas. Only text is made here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from poprun_py.hardware.reader import Machine
from poprun_py.hardware.sysfs import format_cpu_list
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.views.drawing import Branch, Look, draw_tree
from poprun_py.views.equal_hosts import instances_of, others, runs_of_equal_hosts

__all__ = ["topology_tree"]


def topology_tree(plan: LaunchPlan, look: Look) -> str:
    """Return hosts > NUMA nodes > instances > replicas, with CPUs, threads and IPUs.

    The replicas of an instance are one line, and so are neighbours with the same CPUs: a thousand
    replicas still fit on a page. Hosts of a large job that look as the one before them are a line.

    Args:
        plan: what to draw.
        look: how.
    """
    trees = []
    for run in runs_of_equal_hosts(plan):
        mine = instances_of(plan, run[0])
        nodes = tuple(
            _nodes(numbers, plan.machines[run[0]], list(group))
            for numbers, group in groupby(mine, key=lambda p: p.placement.numa_nodes)
        )
        trees.append(Branch(kind="host", name=plan.topology.hosts[run[0]].name, children=nodes))
        trees += [others(plan, run)] if len(run) > 1 else []
    return "\n".join(draw_tree(tree, look) for tree in trees)


def _nodes(nodes: tuple[int, ...], machine: Machine | None, group: list[InstancePlan]) -> Branch:
    """Return the NUMA nodes that a group of instances runs on."""
    runs = groupby(group, key=lambda p: (p.placement, p.instance.ild))
    children = tuple(_instances(list(run)) for _, run in runs)
    if not nodes:
        return Branch(kind="node", name="any CPU", children=children)
    own = [n for n in machine.numa_nodes if n.index in nodes] if machine is not None else []
    cpus = sorted(cpu for node in own for cpu in node.cpus)
    memory = sum(node.memory_bytes for node in own)
    return Branch(
        kind="node",
        name=_named("NUMA node", nodes),
        details=_joined(cpus and _named("CPU", cpus), memory and f"{memory / 2**30:.1f} GiB"),
        children=children,
    )


def _instances(run: list[InstancePlan]) -> Branch:
    """Return neighbours that run on the same CPUs, with their replicas; nearly always one."""
    first, last = run[0], run[-1]
    placement, own = first.placement, first.instance.replicas
    each = " each" if len(run) > 1 else ""
    width = len(first.instance.ipus) // len(own)
    replicas = Branch(
        kind="replica",
        name=_named("replica", range(own.start, last.instance.replicas.stop)),
        details=_joined(
            _named("IPU", range(first.instance.ipus.start, last.instance.ipus.stop)),
            width > 1 and f"{width} each",
        ),
    )
    return Branch(
        kind="instance",
        name=_named("instance", [p.instance.index for p in run]),
        details=_joined(
            _named("CPU", placement.cpus) if placement.cpus else "any CPU",
            placement.threads and _counted(placement.threads, "thread") + each,
            each and _counted(len(own), "replica") + each,
            f"ILD {first.instance.ild}",
        ),
        children=(replicas,),
    )


def _named(noun: str, numbers: Sequence[int]) -> str:
    """Return ``IPU 3`` or ``IPUs 3-5``."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {format_cpu_list(numbers)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _joined(*details: object) -> str:
    return ", ".join(str(detail) for detail in details if detail)
