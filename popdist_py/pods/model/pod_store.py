"""The interface of pod stores, the objects through which programs read and change pods.

``FolderStore`` implements the interface for a pod in a folder of this machine. ``ServerStore``
implements it for a pod that a server keeps. Every call is atomic. If a process is killed during a
call, the call is either complete or has no effect.
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
    """Return the name of the user who runs this process, the default user of a store."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # in a container, the user id may not have a name
        return str(uid)


class PodStore(Protocol):
    """The interface through which programs read and change a pod.

    Every method raises UnreachableError, DamagedError or PodError if the pod cannot be used. Other
    errors are named in the docstring of each method.
    """

    where: str  # for messages: the folder or http://HOST:PORT
    user: str  # the user who makes the calls

    def pod(self) -> Pod:
        """Return the pod without its partitions."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, sorted by name."""

    def partition(self, name: str) -> Partition:
        """Return the current state of one partition.

        Raises:
            UnknownNameError: No partition has this name.
        """

    def create_partition(self, request: PartitionRequest) -> Partition:
        """Make a partition of free IPUs.

        Raises:
            InvalidRequestError: The request breaks a rule.
            NameTakenError: Another partition has this name.
            UnknownNameError: The requested allocation or cluster does not exist.
            NotEnoughIpusError: Too few IPUs are free. The error message names the request, the free
                IPUs, and the users who own the other IPUs.
        """

    def reset_partition(self, name: str) -> Partition:
        """Reset a partition to its initial state.

        Raises:
            UnknownNameError: No partition has this name.
            InUseError: A process holds IPUs of the partition.
        """

    def fail_partition(self, name: str, reason: str) -> Partition:
        """Put a partition into the state ERROR, as broken hardware would.

        Raises:
            UnknownNameError: No partition has this name.
        """

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Remove a partition and free its IPUs.

        With ``force``, a partition that is in use or belongs to another user is removed too.

        Raises:
            UnknownNameError: No partition has this name.
            InUseError: A process holds IPUs of the partition.
            NotAllowedError: The partition belongs to another user.
        """

    def create_cluster(self, cluster: Cluster) -> None:
        """Make a cluster of agents that do not belong to a cluster yet.

        Raises:
            InvalidRequestError: The cluster breaks a rule.
            NameTakenError: Another cluster has this name.
            UnknownNameError: An agent does not exist in the pod.
            InUseError: An agent belongs to another cluster.
        """

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster.

        Raises:
            UnknownNameError: No cluster has this name.
            InUseError: The cluster has allocations.
        """

    def create_allocation(self, allocation: Allocation) -> None:
        """Make an allocation, a group of agents from which partitions take their IPUs.

        Raises:
            InvalidRequestError: The allocation breaks a rule.
            NameTakenError: Another allocation has this name.
            UnknownNameError: The cluster does not exist, or an agent does not belong to the
                cluster.
        """

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation.

        Raises:
            UnknownNameError: No allocation has this name.
            InUseError: The allocation has partitions.
        """

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        """Attach IPUs of a partition to ``holder`` until ``detach``, or until this process ends.

        Args:
            partition: The name of a partition that is ACTIVE.
            num_ipus: The number of IPUs, which must be a power of two if ``ipus`` is None. If
                ``num_ipus`` IPUs fit into one IPU-Link domain, the store attaches the first free
                device of this size. A larger number of IPUs consists of whole IPU-Link domains.
            holder: The process that gets the IPUs. If the holder is not this process, this process
                must end when the holder ends.
            ipus: The numbers of the IPUs to attach, which count from 0 within the partition. If
                ``ipus`` is None, the store chooses the IPUs.

        Raises:
            UnknownNameError: No partition has this name.
            InvalidRequestError: An argument breaks a rule, or the partition is in the state ERROR.
            InUseError: Too few IPUs are free, or the partition is PENDING. The message names the
                processes that hold the IPUs.
            NotEnoughIpusError: The partition has fewer than ``num_ipus`` IPUs.
        """

    def detach(self, attachment: Attachment) -> None:
        """Release the IPUs of an attachment. A second call does nothing."""

    def attachments(self) -> tuple[Attachment, ...]:
        """Return the attachments of all holders that are still running."""

    def close(self) -> None:
        """Close this store, and release the IPUs that it attached. A second call does nothing."""
