"""The topology of a job, which assigns instances, replicas and IPUs to hosts.

If the instances of a job have L replicas each, instance i has L replicas from the index iL on. Each
host of a job gets a contiguous block of instances. If a job with I instances has D IPU-Link domains
(of at most 64 IPUs each), instance i is in the IPU-Link domain i * D / I, rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.errors import are, counted
from poprun_py.errors import StartError, UsageError
from poprun_py.machines.host_list import Host
from poprun_py.options.launch_config import LaunchConfig, fewest_link_domains


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance with its indices, its IPU-Link domain, its replicas and its IPUs."""

    index: int
    local_index: int
    host_index: int
    ild: int
    replicas: range
    ipus: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The topology of a job, with its instances in the order of their indices."""

    num_replicas: int
    num_instances: int
    ipus_per_replica: int
    num_ilds: int
    hosts: tuple[Host, ...]
    instances: tuple[Instance, ...]
    idle_hosts: tuple[Host, ...] = ()

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas of each instance."""
        return self.num_replicas // self.num_instances

    @property
    def instances_per_host(self) -> int:
        """The number of instances on each host."""
        return self.num_instances // len(self.hosts)

    @property
    def spans_hosts(self) -> bool:
        """Whether instances run on machines other than the one where the launcher runs."""
        return not all(host.is_local for host in self.hosts)

    @property
    def num_ipus(self) -> int:
        """The number of IPUs of all instances of the job."""
        return self.num_replicas * self.ipus_per_replica

    @property
    def ipus_per_ild(self) -> int:
        """The number of the job's IPUs in each IPU-Link domain.

        An IPU-Link domain has more than 64 IPUs only if one instance has more than 64 IPUs.
        """
        return self.num_ipus // self.num_ilds


def make_topology(
    config: LaunchConfig, hosts: tuple[Host, ...], *, num_ilds: int | None = None
) -> Topology:
    """Divide the instances of ``config`` evenly among ``hosts``.

    If there are more hosts than instances, the last hosts stay idle. ``num_ilds`` is the number of
    IPU-Link domains of the job's partition; None without a partition. Without a partition, the job
    has the number of IPU-Link domains that ``config`` requests, or the smallest possible number.

    Raises:
        UsageError: The number of instances is not a multiple of the number of hosts, or a host has
            fewer slots than instances.
        StartError: The partition does not have the number of IPU-Link domains that ``config``
            requests, or the number of instances is not a multiple of the number of IPU-Link
            domains.
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
                f"host {host.name} has {counted(host.slots, 'slot')}, but "
                f"{counted(share, 'instance')} {are(share)} planned on this host "
                f"({config.shown('num_instances')} / {counted(num_hosts, 'host')}); give the host "
                "more slots, or change the number of instances or the hosts"
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
    if of_partition is None:
        num_ipus = config.num_replicas * config.ipus_per_replica
        return config.num_ilds or fewest_link_domains(config.num_instances, num_ipus)
    domains = counted(of_partition, "IPU-Link domain")
    if config.num_ilds not in (None, of_partition):
        raise StartError(
            f"{config.shown('num_ilds')} does not match the partition, which has {domains}; give "
            f"--num-ilds {of_partition}, omit the option, or add --update-partition yes to replace "
            "the partition"
        )
    if config.num_instances % of_partition:
        raise StartError(
            f"{config.shown('num_instances')} cannot be split evenly over the {domains} of the "
            f"partition: expected a multiple of {of_partition} instances, at least one for each "
            "IPU-Link domain"
        )
    return of_partition
