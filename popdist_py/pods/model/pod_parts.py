"""Immutable classes for the IPUs, agents, clusters, allocations and partitions of a pod.

Agents, clusters, allocations and partitions have the same meaning as in Graphcore's V-IPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from popdist_py.device_numbers import IPUS_PER_MACHINE, device_id

# The text fields of ``Holder`` are cut to this length, which is the limit for file names in Linux.
_MOST_CHARACTERS = 255


class SyncType(StrEnum):
    """V-IPU's sync types. Each value is the name of the type in V-IPU's protocol.

    C2_COMPATIBLE, the first member, is the default.
    """

    C2_COMPATIBLE = "ST_GS2_DEFAULT"
    INDEPENDENT_RAILS = "ST_GS2_INDEPENDENT_RAILS"
    POD_NATIVE_DEFAULT = "ST_POD_NATIVE_DEFAULT"
    POD_NATIVE_REPLICATED_PIPELINE = "ST_POD_NATIVE_REPLICATED_PIPELINE"


class PartitionState(StrEnum):
    """The state of a partition. IPUs can be attached only if the state is ACTIVE.

    Tables show these values as they are. PopRun's log shows them with the prefix ``PS_``.
    """

    PENDING = "PENDING"
    ACTIVE = "ACTIVE"
    ERROR = "ERROR"


class OperationState(StrEnum):
    """The operation that is in progress on a partition."""

    IDLE = "IDLE"
    CREATING = "CREATING"
    RESETTING = "RESETTING"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """An IPU-Machine with its IPUs and its host."""

    name: str
    host: str
    num_ipus: int = IPUS_PER_MACHINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A group of connected agents (IPU-Machines) in IPU-Link domains of equal size.

    ``topology`` is ``mesh`` or ``torus``, the topology of the IPU-Links. ``is_looped`` tells
    whether the GW-Links between the domains form a ring.
    """

    name: str
    agents: tuple[str, ...]
    num_ilds: int = 1
    topology: str = "mesh"
    is_looped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A group of agents of one cluster. Each partition takes its IPUs from one allocation."""

    name: str
    cluster: str
    agents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ipu:
    """One emulated IPU of a pod.

    ``index`` is the number of the IPU in the pod. ``number`` is the number of the IPU in its
    IPU-Machine. The first IPU of an IPU-Machine has the highest number, usually 3. ``domain`` is
    the number of the IPU-Link domain in the cluster.
    """

    index: int
    agent: str
    host: str
    cluster: str
    domain: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A named set of emulated IPUs, which may belong to several hosts.

    A new partition is PENDING for ``create_seconds``. A reset partition is PENDING for
    ``reset_seconds``. On real hardware, the creation and the reset of a partition take minutes. By
    default, emulated partitions are ready immediately.
    """

    name: str
    agents: tuple[Agent, ...]
    clusters: tuple[Cluster, ...]
    allocations: tuple[Allocation, ...]
    create_seconds: float = 0.0
    reset_seconds: float = 0.0

    def ipus(self) -> tuple[Ipu, ...]:
        """Return the IPUs of all clusters, in the order of the clusters and their agents."""
        agents = {agent.name: agent for agent in self.agents}
        found: list[Ipu] = []
        for cluster in self.clusters:
            for position, name in enumerate(cluster.agents):
                agent = agents[name]
                found += [
                    Ipu(
                        index=len(found) + i,
                        agent=name,
                        host=agent.host,
                        cluster=cluster.name,
                        domain=position * cluster.num_ilds // len(cluster.agents),
                        number=agent.num_ipus - 1 - i,
                    )
                    for i in range(agent.num_ipus)
                ]
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionRequest:
    """The requirements for a new partition (V-IPU's PartitionRequirements).

    If ``allocation`` or ``cluster`` is None, the pod chooses one with enough free IPUs. If
    ``num_ilds`` is None, the partition gets as few IPU-Link domains as possible. The default of
    ``num_replicas`` is the value of ``num_gcds``, and the default of ``sync_type`` is
    C2_COMPATIBLE.
    """

    name: str
    size: int
    allocation: str | None = None
    cluster: str | None = None
    num_gcds: int = 1
    num_ilds: int | None = None
    num_replicas: int | None = None
    reconfigurable: bool = False
    sync_type: SyncType | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a program can use: one IPU of a partition, or a group of 2, 4, 8, ... IPUs.

    ``ipus`` contains the numbers of the IPUs, which count from 0 within the partition.
    """

    id: int
    ipus: range


def devices_of(num_ipus: int, num_ilds: int) -> Iterator[Device]:
    """Yield the devices of a partition in the order of their ids.

    The single IPUs come first, then the pairs, the groups of four and the larger groups. All IPUs
    of a device are in the same IPU-Link domain.
    """
    size = 1
    while size <= num_ipus // num_ilds:
        for position in range(num_ipus // size):
            ipus = range(position * size, (position + 1) * size)
            yield Device(device_id(num_ipus, size, position), ipus)
        size *= 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A named set of IPUs that jobs use separately from other partitions.

    The IPUs of a partition are numbered from 0 in the order of ``ipus``. ``ipus`` contains one
    group of adjacent IPUs for each of the ``num_ilds`` IPU-Link domains. ``owner`` is the user who
    made the partition. ``created`` is the time of the creation, in seconds since the epoch.
    ``error`` is the reason for the state ERROR. ``generation`` is the number of times that the
    partition was reset.
    """

    name: str
    cluster: str
    allocation: str
    ipus: tuple[Ipu, ...]
    num_gcds: int
    num_ilds: int
    num_replicas: int
    reconfigurable: bool
    sync_type: SyncType
    owner: str
    created: float
    state: PartitionState = PartitionState.ACTIVE
    operation: OperationState = OperationState.IDLE
    error: str = ""
    generation: int = 0

    @property
    def size(self) -> int:
        """The number of IPUs, a power of two."""
        return len(self.ipus)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the partition's IPU-Machines, in the order of the IPUs."""
        return tuple(dict.fromkeys(ipu.host for ipu in self.ipus))

    def domain_of(self, ipu: int) -> int:
        """Return the number of the IPU-Link domain that contains the IPU.

        Domains and IPUs are numbered from 0 within the partition.
        """
        return ipu * self.num_ilds // self.size

    def devices(self) -> Iterator[Device]:
        """Return all devices of the partition, in the order of their ids."""
        return devices_of(self.size, self.num_ilds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that has attached IPUs: a job's launcher, or a program without a launcher.

    The names of programs and users may contain any characters. In the fields of this class,
    unprintable characters are replaced by ``?``, and texts are cut to 255 characters.
    """

    host: str
    pid: int
    user: str
    program: str
    run_id: str = ""

    def __post_init__(self) -> None:
        """Make the text fields printable, and shorten long texts."""
        for name in ("host", "user", "program", "run_id"):
            text = getattr(self, name)[:_MOST_CHARACTERS]
            if not text.isprintable():
                text = "".join(each if each.isprintable() else "?" for each in text)
            object.__setattr__(self, name, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """A record that some IPUs of a partition belong to one process, the holder.

    ``ipus`` contains the numbers of the IPUs, which count from 0 within the partition. Only the
    holder knows ``id``, which is needed to detach the IPUs. Attachments in lists have an empty
    ``id``.
    """

    id: str
    partition: str
    ipus: tuple[int, ...]
    holder: Holder
    since: float
