"""The parts of a pod as values: IPUs, agents, clusters, allocations, partitions and holders.

The terms are those of V-IPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from popdist_py.device_numbers import IPUS_PER_MACHINE, LINK_DOMAIN_IPUS, device_id

__all__ = [
    "IPUS_PER_MACHINE",
    "LINK_DOMAIN_IPUS",
    "Agent",
    "Allocation",
    "Attachment",
    "Cluster",
    "Device",
    "Holder",
    "Ipu",
    "OperationState",
    "Partition",
    "PartitionRequest",
    "PartitionState",
    "Pod",
    "SyncType",
    "device_id",
    "devices_of",
]

# The longest name of a file.
_MOST_CHARACTERS = 255


class SyncType(StrEnum):
    """V-IPU's sync types, by their protocol names; the first is the default."""

    C2_COMPATIBLE = "ST_GS2_DEFAULT"
    INDEPENDENT_RAILS = "ST_GS2_INDEPENDENT_RAILS"
    POD_NATIVE_DEFAULT = "ST_POD_NATIVE_DEFAULT"
    POD_NATIVE_REPLICATED_PIPELINE = "ST_POD_NATIVE_REPLICATED_PIPELINE"


class PartitionState(StrEnum):
    """Whether a partition can be used. Tables show the value, PopRun's log ``PS_`` before it."""

    PENDING = "PENDING"
    ACTIVE = "ACTIVE"
    ERROR = "ERROR"


class OperationState(StrEnum):
    """What is being done to a partition."""

    IDLE = "IDLE"
    CREATING = "CREATING"
    RESETTING = "RESETTING"
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """An IPU-Machine: its IPUs, and the host that it is attached to."""

    name: str
    host: str
    num_ipus: int = IPUS_PER_MACHINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Agents that are wired together, in equal IPU-Link domains, agent by agent.

    ``topology`` of the IPU-Links is ``mesh`` or ``torus`` (the loop is closed); ``is_looped`` says
    whether the GW-Links between the domains form a ring.
    """

    name: str
    agents: tuple[str, ...]
    num_ilds: int = 1
    topology: str = "mesh"
    is_looped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Agents of one cluster that users may have partitions of: none spans two allocations."""

    name: str
    cluster: str
    agents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ipu:
    """One emulated IPU of a pod.

    ``index`` is its number in the pod, ``number`` the IPU# in its IPU-Machine, which counts down
    from 3; ``domain`` is the IPU-Link domain within the cluster.
    """

    index: int
    agent: str
    host: str
    cluster: str
    domain: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A named set of emulated IPUs over hosts.

    ``create_seconds`` and ``reset_seconds`` are how long a partition stays PENDING then: real ones
    take minutes, emulated ones no time unless the pod's file says so.
    """

    name: str
    agents: tuple[Agent, ...]
    clusters: tuple[Cluster, ...]
    allocations: tuple[Allocation, ...]
    create_seconds: float = 0.0
    reset_seconds: float = 0.0

    def ipus(self) -> tuple[Ipu, ...]:
        """Return all IPUs, cluster by cluster and agent by agent."""
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
    """What is asked of a new partition (V-IPU's PartitionRequirements).

    None lets the pod decide: ``allocation`` and ``cluster`` any with room, ``num_ilds`` as few as
    hold the size, ``num_replicas`` = ``num_gcds``, ``sync_type`` the default.
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
    """What a program can attach to: one IPU of a partition, or a group of 2, 4, 8, ... of them.

    ``ipus`` are numbered within the partition.
    """

    id: int
    ipus: range


def devices_of(num_ipus: int, num_ilds: int) -> Iterator[Device]:
    """Return the devices of a partition in the order of their ids: single IPUs, pairs, fours, ...

    No device spans IPU-Link domains.
    """
    size = 1
    while size <= num_ipus // num_ilds:
        for position in range(num_ipus // size):
            ipus = range(position * size, (position + 1) * size)
            yield Device(device_id(num_ipus, size, position), ipus)
        size *= 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A named, isolated set of IPUs, numbered from 0 in the order of ``ipus``.

    The IPUs of one IPU-Link domain stand together: ``num_ilds`` equal runs of neighbours. ``owner``
    is the user who made it; ``created`` a time in seconds since the epoch; ``error`` says what is
    wrong in the state ERROR. A partition is ``generation`` 0 when made, one more after each reset.
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
        """The hosts of its IPU-Machines, in order."""
        return tuple(dict.fromkeys(ipu.host for ipu in self.ipus))

    def domain_of(self, ipu: int) -> int:
        """Return the partition's IPU-Link domain, from 0, of an IPU numbered within it."""
        return ipu * self.num_ilds // self.size

    def devices(self) -> Iterator[Device]:
        """Return all devices in the order of their ids."""
        return devices_of(self.size, self.num_ilds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds IPUs: a job's launcher for its instances, or a program that no launcher started.

    Its texts are names of files and users, which may be any bytes: what cannot be printed stands as
    ``?``, and no more than 255 characters stand.
    """

    host: str
    pid: int
    user: str
    program: str
    run_id: str = ""

    def __post_init__(self) -> None:
        """Make the texts such that they can be kept, sent and shown."""
        for name in ("host", "user", "program", "run_id"):
            text = getattr(self, name)[:_MOST_CHARACTERS]
            if not text.isprintable():
                text = "".join(each if each.isprintable() else "?" for each in text)
            object.__setattr__(self, name, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """IPUs of a partition, numbered within it, that a holder has to itself.

    ``id`` is known to the holder alone where the pod is kept by a server, and empty in lists.
    """

    id: str
    partition: str
    ipus: tuple[int, ...]
    holder: Holder
    since: float
