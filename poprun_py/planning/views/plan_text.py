"""A plan as a tree: hosts, NUMA nodes, instances, replicas. Only text is made here."""

from __future__ import annotations

from itertools import groupby

from popdist_py.errors import counted
from poprun_py.machines.machine import Machine
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.views.plan_tree import (
    instances_of,
    others,
    runs_of_equal_hosts,
    runs_of_equal_instances,
)
from poprun_py.planning.views.text_drawing import Branch, TextStyle, draw_tree
from poprun_py.texts import bytes_text, numbered


def topology_tree(plan: LaunchPlan, look: TextStyle) -> str:
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
    children = tuple(map(_instances, runs_of_equal_instances(group)))
    if not nodes:
        return Branch(kind="node", name="any CPU", children=children)
    own = [n for n in machine.numa_nodes if n.index in nodes] if machine is not None else []
    cpus = sorted(cpu for node in own for cpu in node.cpus)
    memory = sum(node.memory_bytes for node in own)
    return Branch(
        kind="node",
        name=numbered("NUMA node", nodes),
        details=_joined(cpus and numbered("CPU", cpus), memory and bytes_text(memory)),
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
        name=numbered("replica", range(own.start, last.instance.replicas.stop)),
        details=_joined(
            numbered("IPU", range(first.instance.ipus.start, last.instance.ipus.stop)),
            width > 1 and f"{width} each",
        ),
    )
    return Branch(
        kind="instance",
        name=numbered("instance", [p.instance.index for p in run]),
        details=_joined(
            numbered("CPU", placement.cpus) if placement.cpus else "any CPU",
            placement.threads and counted(placement.threads, "thread") + each,
            each and counted(len(own), "replica") + each,
            f"ILD {first.instance.ild}",
        ),
        children=(replicas,),
    )


def _joined(*details: object) -> str:
    return ", ".join(str(detail) for detail in details if detail)
