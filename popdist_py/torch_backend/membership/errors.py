"""Error classes of the back end.

Each class derives from an error class of this library and an error class of torch.

MismatchError      CollectiveMismatchError, dist.DistBackendError: the ranks make different calls
RankLostError      InstanceLostError, dist.DistBackendError: a rank ended, left, or was too late
GroupClosedError   PopdistError, dist.DistBackendError: the group was destroyed
StoreLostError     InstanceLostError, dist.DistStoreError: the store of the group does not answer

dist.DistBackendError and dist.DistStoreError are RuntimeErrors, because programs that were written
for gloo catch RuntimeErrors. A call with wrong arguments raises ValueError or TypeError on the rank
that makes the call.
"""

from __future__ import annotations

import torch.distributed as dist

from popdist_py.errors import CollectiveMismatchError, InstanceLostError, PopdistError

__all__ = [
    "GroupClosedError",
    "MismatchError",
    "RankLostError",
    "StoreLostError",
    "as_torch_error",
    "store_lost",
]


class MismatchError(CollectiveMismatchError, dist.DistBackendError):
    """The ranks called different collectives, or one collective with different arguments."""


class RankLostError(InstanceLostError, dist.DistBackendError):
    """Another rank ended, left the group, or did not make its call in time."""


class GroupClosedError(PopdistError, dist.DistBackendError):
    """The process group was destroyed or aborted."""


class StoreLostError(InstanceLostError, dist.DistStoreError):
    """The group's store (torch's key-value store) does not answer."""


def as_torch_error(error: PopdistError) -> PopdistError:
    """Convert an error that a collective has raised to one of the error classes of this module."""
    if isinstance(error, dist.DistError):
        return error
    if isinstance(error, CollectiveMismatchError):
        return MismatchError(*error.args)
    if isinstance(error, InstanceLostError):
        return RankLostError(*error.args)
    return error


def store_lost(rank: str, error: Exception) -> StoreLostError:
    """Return the error for a group whose key-value store does not answer.

    Args:
        rank: The name of this rank in error messages.
        error: The error that the store has raised.
    """
    return StoreLostError(
        f"{rank} cannot reach the key-value store of the process group. The process that runs the "
        f"store (rank 0 or the launcher) has probably ended. Error of the store: {error}"
    )
