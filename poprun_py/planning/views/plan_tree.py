"""A launch plan as a tree: groups of equal hosts, and their groups of equal instances.

plan_text.py and plan_pictures.py draw a plan from its tree. Neighbouring hosts with equal machines
and equal placements are one group. Neighbouring instances with the same placement are one group.
Texts and pictures of a large job therefore stay short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from popdist_py.errors import counted
from poprun_py.display.formatting import numbered
from poprun_py.machines.host_list import compress
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.instances_on_hosts import Instance, Topology
from poprun_py.planning.launch_plan import InstancePlan, LaunchPlan

# If a plan has at most this many hosts, each host is drawn separately. If a plan has at most this
# many IPU-Link domains, hosts of different IPU-Link domains are drawn separately.
_MOST_UNGROUPED = 4
# If more instances than this number may run on a core, the core has the label ``MANY``.
_MOST_OWNERS = 2

IDLE, FORBIDDEN, MANY, SLOW = ".", "x", "*", "'"
# The meanings of the signs in the labels of cores.
LEGEND = {
    IDLE: "no instance",
    FORBIDDEN: "not allowed",
    MANY: "several instances",
    SLOW: "slower core",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceGroup:
    """Neighbouring instances with the same placement in one IPU-Link domain.

    ``replicas`` and ``ipus`` are the replicas and IPUs of all instances of the group.
    """

    indices: range
    placement: Placement
    ild: int
    replicas: range
    ipus: range

    @property
    def replicas_each(self) -> int:
        """The number of replicas of each instance in this group of equal instances."""
        return len(self.replicas) // len(self.indices)

    @property
    def ipus_per_replica(self) -> int:
        """The number of IPUs of each replica in this group of equal instances."""
        return len(self.ipus) // len(self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """Neighbouring hosts with equal machines and equal placements.

    ``instances`` are the instances of the first host. ``other_ends`` are the first and the last
    instance of the group's remaining hosts; None if the group has only one host. ``has_domains``
    tells whether the job has several IPU-Link domains.
    """

    names: tuple[str, ...]
    machine: Machine | None
    instances: tuple[InstanceGroup, ...]
    other_ends: tuple[Instance, Instance] | None
    has_domains: bool

    @property
    def name(self) -> str:
        """The name of the first host in this group of equal hosts."""
        return self.names[0]

    @property
    def first_index(self) -> int:
        """The index of the first instance on the first host in this group of equal hosts."""
        return self.instances[0].indices.start

    @property
    def placements(self) -> dict[int, Placement]:
        """The placements of the instances on the group's first host, by index of the instance."""
        return {index: group.placement for group in self.instances for index in group.indices}

    @property
    def others(self) -> str:
        """The names of all hosts but the first, such as ``node[1-3]``; empty for a single host."""
        return compress(self.names[1:]) if len(self.names) > 1 else ""

    def others_details(self, domain: str = "ILD") -> str:
        """Return a text about all hosts but the first: ``as n0, instances 1-3, replicas 4-15``.

        ``as n0`` means the same hardware and placements as on host n0. ``domain`` is the word for
        an IPU-Link domain in the text.
        """
        assert self.other_ends is not None
        first, last = self.other_ends
        ilds = range(first.ild, last.ild + 1)
        return (
            f"as {self.name}, {numbered('instance', range(first.index, last.index + 1))}, "
            f"{numbered('replica', range(first.replicas.start, last.replicas.stop))}"
            f"{f', {numbered(domain, ilds)}' if self.has_domains else ''}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTree:
    """The tree of a launch plan, which is drawn as text, as a picture and as an HTML page."""

    topology: Topology
    hosts: tuple[HostGroup, ...]

    @property
    def headline(self) -> str:
        """A headline such as ``2 instances, 8 replicas, 8 IPUs on localhost``."""
        topology = self.topology
        domains = f" in {topology.num_ilds} IPU-Link domains" if topology.num_ilds > 1 else ""
        hosts = topology.hosts
        where = hosts[0].name if len(hosts) == 1 else f"{len(hosts)} hosts"
        return (
            f"{counted(topology.num_instances, 'instance')}, "
            f"{counted(topology.num_replicas, 'replica')}, "
            f"{counted(topology.num_ipus, 'IPU')}{domains} on {where}"
        )


def plan_tree(plan: LaunchPlan) -> PlanTree:
    """Return the tree of a launch plan."""
    groups = (_host_group(plan, hosts) for hosts in _equal_hosts(plan))
    return PlanTree(topology=plan.topology, hosts=tuple(groups))


def _instances_of(plan: LaunchPlan, host: int) -> tuple[InstancePlan, ...]:
    count = plan.topology.instances_per_host
    return plan.instances[host * count : (host + 1) * count]


def _equal_hosts(plan: LaunchPlan) -> Iterator[range]:
    """Yield the indices of the hosts in each group of equal hosts."""
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
    groups = groupby(_instances_of(plan, hosts[0]), key=lambda p: (p.placement, p.instance.ild))
    ends = None
    if len(hosts) > 1:
        first, last = _instances_of(plan, hosts[1])[0], _instances_of(plan, hosts[-1])[-1]
        ends = (first.instance, last.instance)
    return HostGroup(
        names=tuple(plan.topology.hosts[host].name for host in hosts),
        machine=plan.machines[hosts[0]],
        instances=tuple(_instance_group(list(members)) for _, members in groups),
        other_ends=ends,
        has_domains=plan.topology.num_ilds > 1,
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


def cache_groups(machine: Machine, node: NumaNode) -> list[list[Core]]:
    """Return the cores of a NUMA node, with one list of cores for each L3 cache."""
    cores = [core for core in machine.cores if core.numa_node == node.index]
    return [list(group) for _, group in groupby(cores, key=lambda core: (core.package, core.l3))]


def core_labels(machine: Machine, placements: Mapping[int, Placement]) -> Callable[[Core], str]:
    """Return a function that returns a label for each core of a host.

    The label contains the indices of the instances that may run on the core, such as ``0/4``, or a
    sign of ``LEGEND``. ``placements`` maps the indices of the host's instances to their placements.
    """
    fastest = max(core.efficiency for core in machine.cores)
    owners: dict[int, set[int]] = {}
    for index, placement in placements.items():
        for cpu in placement.cpus or machine.allowed_cpus:
            owners.setdefault(cpu, set()).add(index)

    def label(core: Core) -> str:
        slow = SLOW if core.efficiency < fastest else ""
        if machine.allowed_cpus.isdisjoint(core.cpus):
            return FORBIDDEN + slow
        indices = sorted(set().union(*(owners.get(cpu, ()) for cpu in core.cpus)))
        if len(indices) > _MOST_OWNERS:
            return MANY + slow
        return ("/".join(map(str, indices)) or IDLE) + slow

    return label
