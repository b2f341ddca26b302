"""The interface of a pod store, which a folder of this machine and a server implement.

Every call is atomic: a process that is killed during a call leaves the pod as before or after it.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from typing import Protocol

from popdist_py.pods.model import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)

__all__ = ["PodStore", "own_user"]


def own_user() -> str:
    """Return as whom a store asks by default: whose process this is; variables are not asked."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # containers run under numbers without a name
        return str(uid)


class PodStore(Protocol):
    """A pod, as those who use it see it.

    All methods raise PodError (``errors.py``): UnreachableError or DamagedError where the pod
    cannot be asked, and what their own text names.
    """

    where: str  # as messages name it: a folder or http://HOST:PORT
    user: str  # as whom this process asks

    def pod(self) -> Pod:
        """Return what the pod consists of now, without its partitions."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions, by name."""

    def partition(self, name: str) -> Partition:
        """Return one partition as it is now (UnknownNameError)."""

    def create_partition(self, request: PartitionRequest) -> Partition:
        """Make a partition of free IPUs.

        InvalidRequestError, NameTakenError, UnknownNameError of the allocation or cluster,
        NotEnoughIpusError with what is asked for, what is free and who has the rest.
        """

    def reset_partition(self, name: str) -> Partition:
        """Bring a partition into its initial state (UnknownNameError, InUseError)."""

    def fail_partition(self, name: str, reason: str) -> Partition:
        """Put a partition into the state ERROR, as broken hardware would (UnknownNameError)."""

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        """Free the IPUs of a partition.

        ``force`` removes also what is in use or belongs to another user. UnknownNameError,
        InUseError, NotAllowedError.
        """

    def create_cluster(self, cluster: Cluster) -> None:
        """Join agents that belong to no cluster (InvalidRequestError, NameTakenError, ...)."""

    def remove_cluster(self, name: str) -> None:
        """Take a cluster apart (UnknownNameError; InUseError while it has allocations)."""

    def create_allocation(self, allocation: Allocation) -> None:
        """Let users have partitions of agents (InvalidRequestError, NameTakenError, ...)."""

    def remove_allocation(self, name: str) -> None:
        """Take an allocation away (UnknownNameError; InUseError while it has partitions)."""

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        """Give ``holder`` IPUs of a partition to itself until ``detach``, or until it is dead.

        Args:
            partition: its name; it must be ACTIVE.
            num_ipus: how many; a power of two up to a domain's IPUs takes a device, more (or all)
                takes whole domains. The first that are free.
            holder: who it is; this process, or one whose death ends this process too.
            ipus: just these, numbered within the partition, in place of the first that are free.

        UnknownNameError, InvalidRequestError; InUseError with who holds them;
        NotEnoughIpusError where the partition has never had so many.
        """

    def detach(self, attachment: Attachment) -> None:
        """Give IPUs back; once more does nothing."""

    def attachments(self) -> tuple[Attachment, ...]:
        """Return who holds what now: those of dead holders are gone."""

    def close(self) -> None:
        """Give back what this store attached, and close it; once more does nothing."""
