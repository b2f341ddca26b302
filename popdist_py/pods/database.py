"""A pod in a folder of this machine: a SQLite database in WAL mode, one writer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from popdist_py.pods.values import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)

__all__ = ["FolderStore"]


class FolderStore:
    """The pod of one folder (``PodStore``); safe to use from several threads, and after a fork."""

    where: str
    user: str

    def __init__(self, folder: Path, *, user: str | None = None, patience: float = 30.0) -> None:
        """Open it; ``user`` is this process's, ``patience`` the wait for other writers in s."""
        raise NotImplementedError

    def with_user(self, user: str) -> FolderStore:
        """Return a view that asks for another user; it is closed with this store."""
        raise NotImplementedError

    def pod(self) -> Pod:
        raise NotImplementedError

    def partitions(self) -> tuple[Partition, ...]:
        raise NotImplementedError

    def partition(self, name: str) -> Partition:
        raise NotImplementedError

    def create_partition(self, request: PartitionRequest) -> Partition:
        raise NotImplementedError

    def reset_partition(self, name: str) -> Partition:
        raise NotImplementedError

    def fail_partition(self, name: str, reason: str) -> Partition:
        raise NotImplementedError

    def remove_partition(self, name: str, *, force: bool = False) -> None:
        raise NotImplementedError

    def create_cluster(self, cluster: Cluster) -> None:
        raise NotImplementedError

    def remove_cluster(self, name: str) -> None:
        raise NotImplementedError

    def create_allocation(self, allocation: Allocation) -> None:
        raise NotImplementedError

    def remove_allocation(self, name: str) -> None:
        raise NotImplementedError

    def attach(
        self, partition: str, num_ipus: int, holder: Holder, *, ipus: Sequence[int] | None = None
    ) -> Attachment:
        raise NotImplementedError

    def attach_renewed(
        self,
        partition: str,
        num_ipus: int,
        holder: Holder,
        *,
        ipus: Sequence[int] | None = None,
        seconds: float,
    ) -> Attachment:
        """Attach for a holder on another host, which has the IPUs as long as it renews them."""
        raise NotImplementedError

    def renew(self, attachment_id: str, seconds: float) -> None:
        """Let a remote holder keep its IPUs for ``seconds`` from now (UnknownNameError: gone)."""
        raise NotImplementedError

    def renew_all(self, seconds: float) -> None:
        """Give all remote holders ``seconds`` from now; from here on this store frees the late.

        A server calls it at its start: only a store that serves frees what was not renewed, so
        that nothing is lost while no server is up.
        """
        raise NotImplementedError

    def detach(self, attachment: Attachment) -> None:
        """Give IPUs back; only ``attachment.id`` counts."""
        raise NotImplementedError

    def attachments(self) -> tuple[Attachment, ...]:
        """Return who holds what now, with empty ids."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what this store attached itself (not what is renewed), and close it."""
        raise NotImplementedError
