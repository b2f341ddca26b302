"""Hosts and instances of a large job that look alike: one is drawn, the others are a line.

Alike are neighbours with equal machines whose instances have equal places on them. Only text is
made here; nothing is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from poprun_py.machines.host_list import compress
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.views.text_drawing import Branch
from poprun_py.texts import numbered

# So many hosts, or IPU-Link domains, can all be looked at.
_ALL_DRAWN = 4


def instances_of(plan: LaunchPlan, host: int) -> tuple[InstancePlan, ...]:
    """Return the instances of the host with this index."""
    share = plan.topology.instances_per_host
    return plan.instances[host * share : (host + 1) * share]


def runs_of_equal_hosts(plan: LaunchPlan) -> Iterator[range]:
    """Give the indices of neighbours that look alike; of few hosts, each by itself.

    Hosts of different IPU-Link domains do not look alike, unless there are very many domains.
    """
    hosts = range(len(plan.topology.hosts))
    if len(hosts) <= _ALL_DRAWN:
        yield from (range(host, host + 1) for host in hosts)
        return

    are_drawn = plan.topology.num_ilds <= _ALL_DRAWN

    def look(host: int) -> object:
        mine = instances_of(plan, host)
        return (
            plan.machines[host],
            [each.placement for each in mine],
            _domains(plan, range(host, host + 1)) if are_drawn else None,
        )

    for _, run in groupby(hosts, key=look):
        equal = list(run)
        yield range(equal[0], equal[-1] + 1)


def runs_of_equal_instances(group: Iterable[InstancePlan]) -> Iterator[list[InstancePlan]]:
    """Give neighbours on the same CPUs of one IPU-Link domain; nearly always one instance."""
    for _, run in groupby(group, key=lambda p: (p.placement, p.instance.ild)):
        yield list(run)


def _domains(plan: LaunchPlan, hosts: range) -> range:
    """Return the IPU-Link domains of neighbouring hosts."""
    first, last = instances_of(plan, hosts[0])[0], instances_of(plan, hosts[-1])[-1]
    return range(first.instance.ild, last.instance.ild + 1)


def others(plan: LaunchPlan, run: range, *, domain: str = "ILD") -> Branch:
    """Return the line that stands for all hosts of a run but the first.

    ``domain`` is how an IPU-Link domain is called; a single one is not worth a word.
    """
    names = [plan.topology.hosts[host].name for host in run]
    first, last = instances_of(plan, run[1])[0].instance, instances_of(plan, run[-1])[-1].instance
    replicas = range(first.replicas.start, last.replicas.stop)
    where = f", {numbered(domain, _domains(plan, run[1:]))}" if plan.topology.num_ilds > 1 else ""
    return Branch(
        kind="host",
        name=compress(names[1:]),
        details=f"as {names[0]}, {numbered('instance', range(first.index, last.index + 1))}, "
        f"{numbered('replica', replicas)}{where}",
    )
