"""A snapshot of a pod's state for display, and the link routing of its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from popdist_py.device_numbers import IPUS_PER_MACHINE, LINK_DOMAIN_IPUS
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Ipu,
    Partition,
    Pod,
)
from popdist_py.pods.model.pod_store import PodStore


class PlacedIpu(NamedTuple):
    """An IPU, with its place in a partition and its attachment if it has these.

    ``number`` is the IPU's number in the partition. ``gcd`` and ``segment`` are the numbers of the
    IPU's graph compilation domain and IPU-Link domain.
    """

    ipu: Ipu
    partition: Partition | None = None
    number: int | None = None
    gcd: int | None = None
    segment: int | None = None
    attachment: Attachment | None = None


class PodSnapshot:
    """The state of a pod: its parts, its partitions, and the processes that hold IPUs."""

    def __init__(self, store: PodStore) -> None:
        self.store = store
        self.pod: Pod = store.pod()
        self.partitions: tuple[Partition, ...] = store.partitions()
        self.attachments: tuple[Attachment, ...] = store.attachments()

    def num_ipus(self, agents: Sequence[str]) -> int:
        """Return the total number of IPUs of ``agents``."""
        return sum(each.num_ipus for each in self.pod.agents if each.name in agents)

    def devices_of(self, partition: Partition) -> list[PlacedIpu]:
        """Return a partition's IPUs with their holders, in the order of the IPUs' numbers."""
        holders = {
            number: attachment
            for attachment in self.attachments
            if attachment.partition == partition.name
            for number in attachment.ipus
        }
        return [
            PlacedIpu(
                ipu,
                partition,
                number,
                gcd=number * partition.num_gcds // partition.size,
                segment=partition.domain_of(number),
                attachment=holders.get(number),
            )
            for number, ipu in enumerate(partition.ipus)
        ]

    def devices(self) -> list[PlacedIpu]:
        """Return all IPUs of the pod, each with its partition and holder, if any."""
        taken = {
            each.ipu.index: each
            for partition in self.partitions
            for each in self.devices_of(partition)
        }
        return [taken.get(ipu.index) or PlacedIpu(ipu) for ipu in self.pod.ipus()]


def ild_routing(partition: Partition, pod: Pod) -> str:
    """Return the routing that V-IPU would choose within each IPU-Link domain of a partition.

    The routing is DNC within one IPU-Machine, where each IPU is connected to every other IPU.
    The routing is RINGSWNC for whole IPU-Link domains of a torus, and SWNC (sliding window) for all
    other domains.
    """
    num_ipus = partition.size // partition.num_ilds
    if num_ipus <= IPUS_PER_MACHINE:
        return "DNC"
    is_ring = num_ipus == LINK_DOMAIN_IPUS and any(
        each.name == partition.cluster and each.topology == "torus" for each in pod.clusters
    )
    return "RINGSWNC" if is_ring else "SWNC"


def gw_routing(partition: Partition, pod: Pod) -> str:
    """Return the routing over the GW-Links between the IPU-Link domains of a partition."""
    if partition.num_ilds == 1:
        return "DEFAULT"
    is_ring = any(each.name == partition.cluster and each.is_looped for each in pod.clusters)
    return "RING" if is_ring else "SWRING"
