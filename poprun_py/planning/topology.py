"""Who is where: instances, replicas, IPUs and IPU-Link domains on hosts. Pure arithmetic.

Numbering: R replicas, I instances, L = R/I; instance i owns replicas iL to iL + L - 1; hosts get
contiguous blocks of instances; replica r owns IPUs rP to rP + P - 1. Of D IPU-Link domains with at
most 64 IPUs each, instance i lies in domain iD / I, rounded down, and so do its replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.errors import are, counted
from poprun_py.errors import StartError, UsageError
from poprun_py.machines.host_list import Host
from poprun_py.options.launch_config import LaunchConfig, fewest_link_domains


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance: its place on a host and what it owns."""

    index: int
    local_index: int
    host_index: int
    ild: int
    replicas: range
    ipus: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The whole job: counts, hosts in order, instances in index order."""

    num_replicas: int
    num_instances: int
    ipus_per_replica: int
    num_ilds: int
    hosts: tuple[Host, ...]
    instances: tuple[Instance, ...]
    idle_hosts: tuple[Host, ...] = ()

    @property
    def num_local_replicas(self) -> int:
        """Replicas of one instance: L = R / I."""
        return self.num_replicas // self.num_instances

    @property
    def instances_per_host(self) -> int:
        """Instances of one host: I / H."""
        return self.num_instances // len(self.hosts)

    @property
    def num_ipus(self) -> int:
        """IPUs of the whole job: R x P."""
        return self.num_replicas * self.ipus_per_replica

    @property
    def ipus_per_ild(self) -> int:
        """IPUs of one IPU-Link domain: R x P / D; over 64 only where an instance has so many."""
        return self.num_ipus // self.num_ilds

    def on_host(self, host_index: int) -> tuple[Instance, ...]:
        """Return the contiguous block of instances of one host."""
        share = self.instances_per_host
        return self.instances[host_index * share : (host_index + 1) * share]


def make_topology(
    config: LaunchConfig, hosts: tuple[Host, ...], *, num_ilds: int | None = None
) -> Topology:
    """Spread the instances of ``config`` over ``hosts``, of which the last may stay idle.

    Args:
        config: what is asked for.
        hosts: where instances may run.
        num_ilds: IPU-Link domains of the partition that the job has; None without one: those of
            ``config``, else as few as hold the IPUs.

    Raises:
        UsageError: the instances do not divide evenly, or exceed a host's slots.
        StartError: the domains of the partition are not those that are asked for, or do not divide
            the instances.
    """
    num_instances = config.num_instances
    hosts, idle_hosts = hosts[:num_instances], hosts[num_instances:]
    num_hosts = len(hosts)
    if num_instances % num_hosts:
        raise UsageError(
            f"{config.shown('num_instances')} cannot be split evenly over {num_hosts} hosts: "
            f"expected a multiple of {num_hosts} instances, or fewer hosts"
        )
    share = num_instances // num_hosts
    for host in hosts:
        if host.slots is not None and host.slots < share:
            raise UsageError(
                f"host {host.name} has {counted(host.slots, 'slot')}, {counted(share, 'instance')} "
                f"{are(share)} planned on it "
                f"({config.shown('num_instances')} / {counted(num_hosts, 'host')}): raise its "
                "slots, or "
                "change the number of instances or the hosts"
            )
    num_ilds = _num_ilds(config, num_ilds)
    local = config.num_replicas // num_instances
    width = config.ipus_per_replica
    return Topology(
        num_replicas=config.num_replicas,
        num_instances=num_instances,
        ipus_per_replica=width,
        num_ilds=num_ilds,
        hosts=hosts,
        idle_hosts=idle_hosts,
        instances=tuple(
            Instance(
                index=i,
                local_index=i % share,
                host_index=i // share,
                ild=i * num_ilds // num_instances,
                replicas=range(i * local, (i + 1) * local),
                ipus=range(i * local * width, (i + 1) * local * width),
            )
            for i in range(num_instances)
        ),
    )


def _num_ilds(config: LaunchConfig, of_partition: int | None) -> int:
    """Return the number of IPU-Link domains; a partition has its own."""
    if of_partition is None:
        num_ipus = config.num_replicas * config.ipus_per_replica
        return config.num_ilds or fewest_link_domains(config.num_instances, num_ipus)
    domains = counted(of_partition, "IPU-Link domain")
    if config.num_ilds not in (None, of_partition):
        raise StartError(
            f"{config.shown('num_ilds')}, but the partition has {domains}: ask for {of_partition} "
            "or for none, or let --update-partition yes change the partition"
        )
    if config.num_instances % of_partition:
        raise StartError(
            f"{config.shown('num_instances')} cannot be split evenly over the {domains} of the "
            f"partition: expected a multiple of {of_partition} instances, at least one for each "
            "IPU-Link domain"
        )
    return of_partition
