"""What partitions may be, which IPUs they get, and which of them a device is: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from popdist_py.pods.values import Partition, PartitionRequest

__all__ = ["check_request", "free_ipus", "misfit"]


def check_request(request: PartitionRequest) -> None:
    """Check what can be checked without a pod (InvalidRequestError)."""
    raise NotImplementedError


def misfit(partition: Partition, request: PartitionRequest) -> str:
    """Say why a job that asks for ``request`` cannot use ``partition``; empty if it can.

    A reconfigurable partition must be large enough; a preconfigured one must be equal in size,
    GCDs, replicas, and, where asked for, IPU-Link domains and sync type.
    """
    raise NotImplementedError


def free_ipus(
    partition: Partition,
    num_ipus: int,
    taken: Collection[int],
    ipus: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the IPUs of a partition that an attachment gets; empty where some are taken.

    InvalidRequestError, NotEnoughIpusError as ``PodStore.attach`` says.
    """
    raise NotImplementedError
