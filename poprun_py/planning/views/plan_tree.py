"""A plan as a tree of values, with groups of hosts, groups of instances, and IPU-Link domains.

The text of a plan (plan_text.py), its SVG picture (plan_svg.py) and its HTML page (plan_page.py)
are drawn from this tree. Neighbouring hosts with equal machines and equal placements are one group,
and so are neighbouring instances with the same placement. Texts and pictures of a large job
therefore stay short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.display.formatting import numbered, ranges_text
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Core, Machine
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan
from poprun_py.planning.topology import Topology

# In a plan with at most this many hosts, each host is a group of its own. In a plan with at most
# this many IPU-Link domains, hosts of different domains are not in the same group.
_MOST_UNGROUPED = 4
# The label of a core names at most this many instances. If more instances may run on the core, the
# label is the sign ``MANY``.
_MOST_OWNERS = 2

IDLE, FORBIDDEN, MANY, SLOW = ".", "x", "*", "'"
# The meanings of the signs in the labels of cores.
LEGEND = {
    IDLE: "no instance",
    FORBIDDEN: "not allowed",
    MANY: "several instances",
    SLOW: "slower core",
}
# The columns of the table of instances.
COLUMNS = (
    *("host", "instance", "NUMA nodes", "CPUs", "memory of nodes", "threads"),
    *("replicas", "IPUs", "IPU-Link domain"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceGroup:
    """Neighbouring instances with the same placement in one IPU-Link domain.

    Nearly every group has one instance. ``replicas`` and ``ipus`` are the replicas and IPUs of all
    instances of the group.
    """

    indices: range
    placement: Placement
    ild: int
    replicas: range
    ipus: range

    @property
    def replicas_each(self) -> int:
        """The number of replicas of each instance of the group."""
        return len(self.replicas) // len(self.indices)

    @property
    def ipus_per_replica(self) -> int:
        """The number of IPUs of each replica of the group."""
        return len(self.ipus) // len(self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherHosts:
    """The hosts of a group after its first host; they are shown on one line.

    ``names`` contains the names of these hosts in a short form, such as ``node[1-3]``. ``ilds`` are
    the indices of the hosts' IPU-Link domains; empty if the job has one domain.
    """

    names: str
    first_host: str
    instances: range
    replicas: range
    ilds: range

    def details(self, domain: str = "ILD") -> str:
        """Return a text about the hosts, such as ``as n0, instances 1-3, replicas 4-15, ILD 0``.

        ``as n0`` says that the hosts have the hardware and placements of host n0. ``domain`` is the
        word to use for an IPU-Link domain.
        """
        where = f", {numbered(domain, self.ilds)}" if self.ilds else ""
        return (
            f"as {self.first_host}, {numbered('instance', self.instances)}, "
            f"{numbered('replica', self.replicas)}{where}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """Neighbouring hosts with equal machines and equal placements.

    ``instances`` are the instances of the first host only.
    """

    names: tuple[str, ...]
    machine: Machine | None
    instances: tuple[InstanceGroup, ...]
    others: OtherHosts | None

    @property
    def name(self) -> str:
        """The name of the first host of the group."""
        return self.names[0]

    @property
    def first_index(self) -> int:
        """The index of the first instance on the first host of the group."""
        return self.instances[0].indices.start

    @property
    def placements(self) -> dict[int, Placement]:
        """The placements on the first host, with the indices of the instances as keys."""
        return {index: group.placement for group in self.instances for index in group.indices}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkDomain:
    """An IPU-Link domain of a job, with its IPUs and the names of its hosts."""

    hosts: tuple[str, ...]
    ipus: range


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTree:
    """The tree of a plan, which is drawn as text, as a picture and as an HTML page.

    ``headline`` is a text such as ``2 instances, 8 replicas, 8 IPUs on localhost``.
    """

    headline: str
    hosts: tuple[HostGroup, ...]
    domains: tuple[LinkDomain, ...]
    num_ipus: int


def plan_tree(plan: LaunchPlan) -> PlanTree:
    """Return the tree of a plan."""
    topology = plan.topology
    share, size = topology.num_instances // topology.num_ilds, topology.ipus_per_ild
    domains = []
    for index in range(topology.num_ilds):
        members = topology.instances[index * share : (index + 1) * share]
        names = dict.fromkeys(topology.hosts[each.host_index].name for each in members)
        ipus = range(index * size, (index + 1) * size)
        domains.append(LinkDomain(hosts=tuple(names), ipus=ipus))
    return PlanTree(
        headline=_headline(topology),
        hosts=tuple(_host_group(plan, hosts) for hosts in _equal_hosts(plan)),
        domains=tuple(domains),
        num_ipus=topology.num_ipus,
    )


def _headline(topology: Topology) -> str:
    domains = f" in {topology.num_ilds} IPU-Link domains" if topology.num_ilds > 1 else ""
    hosts = topology.hosts
    where = hosts[0].name if len(hosts) == 1 else f"{len(hosts)} hosts"
    return (
        f"{counted(topology.num_instances, 'instance')}, "
        f"{counted(topology.num_replicas, 'replica')}, "
        f"{counted(topology.num_ipus, 'IPU')}{domains} on {where}"
    )


def _instances_of(plan: LaunchPlan, host: int) -> tuple[InstancePlan, ...]:
    count = plan.topology.instances_per_host
    return plan.instances[host * count : (host + 1) * count]


def _equal_hosts(plan: LaunchPlan) -> Iterator[range]:
    """Yield the indices of the hosts of each group of equal hosts."""
    hosts = range(len(plan.topology.hosts))
    if len(hosts) <= _MOST_UNGROUPED:
        yield from (range(host, host + 1) for host in hosts)
        return
    is_by_domain = plan.topology.num_ilds <= _MOST_UNGROUPED

    def appearance(host: int) -> object:
        instances = _instances_of(plan, host)
        domains = {each.instance.ild for each in instances} if is_by_domain else None
        return plan.machines[host], [each.placement for each in instances], domains

    for _, neighbours in groupby(hosts, key=appearance):
        indices = list(neighbours)
        yield range(indices[0], indices[-1] + 1)


def _host_group(plan: LaunchPlan, hosts: range) -> HostGroup:
    names = tuple(plan.topology.hosts[host].name for host in hosts)
    groups = groupby(_instances_of(plan, hosts[0]), key=lambda p: (p.placement, p.instance.ild))
    others = None
    if len(hosts) > 1:
        first = _instances_of(plan, hosts[1])[0].instance
        last = _instances_of(plan, hosts[-1])[-1].instance
        has_domains = plan.topology.num_ilds > 1
        others = OtherHosts(
            names=compress(names[1:]),
            first_host=names[0],
            instances=range(first.index, last.index + 1),
            replicas=range(first.replicas.start, last.replicas.stop),
            ilds=range(first.ild, last.ild + 1) if has_domains else range(0),
        )
    return HostGroup(
        names=names,
        machine=plan.machines[hosts[0]],
        instances=tuple(_instance_group(list(members)) for _, members in groups),
        others=others,
    )


def _instance_group(members: Sequence[InstancePlan]) -> InstanceGroup:
    first, last = members[0].instance, members[-1].instance
    return InstanceGroup(
        indices=range(first.index, last.index + 1),
        placement=members[0].placement,
        ild=first.ild,
        replicas=range(first.replicas.start, last.replicas.stop),
        ipus=range(first.ipus.start, last.ipus.stop),
    )


def instance_rows(tree: PlanTree) -> list[tuple[str, ...]]:
    """Return the rows of a table of the instances, with a cell for each column of ``COLUMNS``.

    The instances of a group's first host have rows of their own. A row with only one cell describes
    all other hosts of the group.
    """
    rows: list[tuple[str, ...]] = []
    for host in tree.hosts:
        for group in host.instances:
            placement = group.placement
            each = " each" if len(group.indices) > 1 else ""
            rows.append(
                (
                    host.name,
                    ranges_text(group.indices),
                    ranges_text(placement.numa_nodes) or "any",
                    ranges_text(placement.cpus) or "any",
                    ranges_text(placement.memory_nodes) or "any",
                    f"{placement.threads or 'unset'}{each}",
                    ranges_text(group.replicas),
                    ranges_text(group.ipus),
                    str(group.ild),
                )
            )
        if host.others is not None:
            rows.append((f"{host.others.names}: {host.others.details('IPU-Link domain')}",))
    return rows


class CoreLabels:
    """Labels of the cores of a host, which name the instances that may run on each core.

    ``placements`` maps the indices of the host's instances to their placements.
    """

    def __init__(self, machine: Machine, placements: Mapping[int, Placement]) -> None:
        self._allowed = machine.allowed_cpus
        self._fastest = max(core.efficiency for core in machine.cores)
        self._owners: dict[int, list[int]] = {}
        for index, placement in placements.items():
            for cpu in placement.cpus or machine.allowed_cpus:
                self._owners.setdefault(cpu, []).append(index)

    def of(self, core: Core) -> str:
        """Return the label of a core, which is a sign or the indices of instances (``0/4``)."""
        return self._owner(core) + (SLOW if core.efficiency < self._fastest else "")

    def _owner(self, core: Core) -> str:
        if not self._allowed.intersection(core.cpus):
            return FORBIDDEN
        indices = sorted({index for cpu in core.cpus for index in self._owners.get(cpu, ())})
        if len(indices) > _MOST_OWNERS:
            return MANY
        return "/".join(map(str, indices)) or IDLE
