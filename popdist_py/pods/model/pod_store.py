"""The interface of a pod store, which a folder of this machine and a server implement.

Every call is atomic. If a process is killed during a call, the call is complete or has no effect.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from typing import Protocol

from popdist_py.pods.model.pod_parts import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)


def own_user() -> str:
    """Return the user of this process, which is the default user of a store."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container may run with a user id without a name
        return str(uid)


class PodStore(Protocol):
    """The interface of a pod.

    All methods raise UnreachableError, DamagedError or PodError if the pod cannot be used. They
    also raise the errors in their descriptions.
    """

    where: str  # for messages: the folder or http://HOST:PORT
    user: str  # the user who makes the calls

    def pod(self) -> Pod:
        """Return the pod without its partitions."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, by name."""

    def partition(self, name: str) -> Partition:
        """Return the current state of one partition (UnknownNameError)."""

    def create_partition(self, request: PartitionRequest) -> Partition:
        """Make a partition of free IPUs.

        It raises InvalidRequestError, NameTakenError, UnknownNameError for the allocation or
        cluster, and NotEnoughIpusError with the request, the free IPUs and the owners of others.
        """

    def reset_partition(self, name: str) -> Partition:
        """Bring a partition into its initial state (UnknownNameError, InUseError)."""

    def fail_partition(self, name: str, reason: str) -> Partition:
        """Put a partition into the state ERROR, as broken hardware would (UnknownNameError)."""

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Free the IPUs of a partition.

        With ``force``, the partition may be in use or belong to another user. The method raises
        UnknownNameError, InUseError and NotAllowedError.
        """

    def create_cluster(self, cluster: Cluster) -> None:
        """Make a cluster of agents without a cluster (InvalidRequestError, NameTakenError, ...)."""

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster (UnknownNameError; InUseError while it has allocations)."""

    def create_allocation(self, allocation: Allocation) -> None:
        """Make an allocation of agents (InvalidRequestError, NameTakenError, ...)."""

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation (UnknownNameError; InUseError while it has partitions)."""

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        """Attach IPUs of a partition for ``holder`` until ``detach``, or until its process ends.

        Args:
            partition: The name of a partition that is ACTIVE.
            num_ipus: The number of IPUs. A power of two up to the size of a domain takes the first
                free device, and a larger number takes whole domains.
            holder: This process, or a process whose end also ends this process.
            ipus: The IPUs to take instead of the first free ones, numbered in the partition.

        It raises UnknownNameError, InvalidRequestError, InUseError with the holders, and
        NotEnoughIpusError if the partition is too small.
        """

    def detach(self, attachment: Attachment) -> None:
        """Release the IPUs of an attachment. A second call does nothing."""

    def attachments(self) -> tuple[Attachment, ...]:
        """Return the attachments of all holders that are alive."""

    def close(self) -> None:
        """Release the IPUs that this store attached, and close it. A second call does nothing."""
