"""Who is where: instances, replicas, IPUs and IPU-Link domains on hosts. Pure arithmetic.

Numbering: R replicas, I instances, L = R/I; instance i owns replicas iL to iL + L - 1; hosts get
contiguous blocks of instances; replica r owns IPUs rP to rP + P - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from poprun_py.config.launch_config import LaunchConfig
from poprun_py.errors import UsageError
from poprun_py.hosts.host_list import Host

__all__ = ["Instance", "Topology", "device_id", "make_topology"]


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

    def on_host(self, host_index: int) -> tuple[Instance, ...]:
        """Return the contiguous block of instances of one host."""
        share = self.instances_per_host
        return self.instances[host_index * share : (host_index + 1) * share]


def make_topology(
    config: LaunchConfig, hosts: tuple[Host, ...], *, num_ilds: int | None = None
) -> Topology:
    """Spread the instances of ``config`` over ``hosts``, of which the last may stay idle.

    ``num_ilds`` is the number of IPU-Link domains of the partition, where one says so.

    Raises:
        UsageError: the instances do not divide evenly, or exceed a host's slots.
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
                f"host {host.name} has {host.slots} slots, {share} instances are planned on it "
                f"({config.shown('num_instances')} / {num_hosts} hosts): raise its slots, or "
                "change the number of instances or the hosts"
            )
    num_ilds = num_ilds or config.num_ilds or 1
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


def device_id(num_ipus: int, device_size: int, position: int) -> int:
    """Return Poplar's id of the ``position``-th device of ``device_size`` IPUs.

    A system of N IPUs numbers its single IPUs first (0 to N - 1), then the pairs, then the fours,
    and so on: devices of s IPUs start at 2N - 2N/s. Counts are rounded up to powers of two.
    Source: the ids in PopRun's logs (16 IPUs in fours: 24 to 27; the parent of 64 IPUs: 126).
    """
    total = 1 << (num_ipus - 1).bit_length()
    size = 1 << (device_size - 1).bit_length()
    return 2 * total - 2 * total // size + position
