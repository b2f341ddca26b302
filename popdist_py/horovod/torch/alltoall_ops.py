"""Horovod's alltoall, which sends a block of rows from every rank to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import Array
from popdist_py.errors import counted
from popdist_py.horovod.torch.allgather_ops import gathered_rows
from popdist_py.horovod.torch.basics import (
    ProcessSet,
    check_process_set,
    communicator,
    global_process_set,
)
from popdist_py.horovod.torch.calls import (
    Call,
    Handle,
    Tensor,
    array_of,
    check_rows,
    differentiable,
)
from popdist_py.public_collectives import leaf_arrays

__all__ = ["alltoall", "alltoall_async"]


def _checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, num_ranks: int) -> Array:
    """Return the number of rows to send to each rank, as an array with one element per rank."""
    if splits is None:
        if len(tensor) % num_ranks:
            raise ValueError(
                f"alltoall: a tensor with {counted(len(tensor), 'row')} cannot be divided equally "
                f"among {counted(num_ranks, 'rank')}. Pass splits, the number of rows for each rank"
            )
        return np.full(num_ranks, len(tensor) // num_ranks, np.int64)
    given = np.asarray(splits)
    if given.dtype.kind not in "iu":
        raise ValueError(
            f"alltoall(splits={given.tolist()}): expected an integer for each rank (its number of "
            "rows), such as torch.tensor([2, 1], dtype=torch.int32)"
        )
    parts = given.astype(np.int64)
    if parts.shape != (num_ranks,) or (parts < 0).any() or parts.sum() != len(tensor):
        raise ValueError(
            f"alltoall(splits={parts.tolist()}): expected "
            f"{counted(num_ranks, 'row count')}, one for each rank, that add up to the "
            f"{len(tensor)} rows of the tensor"
        )
    return parts


def _exchange(tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None) -> Call:
    """Return a ``Call`` that exchanges blocks of rows between the ranks.

    The result of the call is the tensor of received rows, and the number of rows from each rank.
    """
    check_rows("alltoall", tensor)
    world = communicator()
    own = world.instance_index
    parts = _checked_splits(tensor, splits, world.num_instances)
    array = array_of("alltoall", tensor)

    def run() -> tuple[Array, Array]:
        all_parts = world.all_gather(parts, name or "")  # [sender, receiver]
        rows = gathered_rows(world, array, all_parts.sum(axis=1), name or "")
        received = all_parts[:, own]
        blocks = zip(rows, all_parts.cumsum(axis=1)[:, own], received, strict=True)
        return np.concatenate([each[end - n : end] for each, end, n in blocks]), received

    def finish(result: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
        rows, received = result
        return leaf_arrays.tensor_like(tensor, rows), torch.from_numpy(received.astype(np.int32))

    return Call(world, "all_to_all", run, finish, [name or ""])


class _AllToAll(torch.autograd.Function):
    """The autograd function of ``alltoall``.

    The backward pass sends the gradients of the received rows back to the ranks that sent the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None
    ) -> tuple[Tensor, Tensor]:
        rows, received = _exchange(tensor, splits, name).now()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return alltoall(gradients[0].contiguous(), ctx.received)[0], None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a block of rows to every rank, and return the received blocks in the order of ranks.

    Args:
        tensor: The tensor to send. The rows of the tensor are split into one block for each rank.
        splits: The number of rows to send to each rank. With None, every rank gets the same number
            of rows.
        name: All ranks must pass the same name.
        process_set: Only ``global_process_set`` is accepted.

    Returns:
        The received tensor. If ``splits`` is given, the result is a tuple of the received tensor
        and an int32 tensor with the number of rows from each rank.

    Raises:
        ValueError: ``splits`` does not fit the number of ranks or the rows of ``tensor``.
    """
    check_process_set(process_set)
    rows, received = differentiable(_AllToAll, tensor, splits, name)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``alltoall`` and return a handle, whose ``wait`` returns the result."""
    check_process_set(process_set)
    call = _exchange(tensor, splits, name)
    return (call.then(itemgetter(0)) if splits is None else call).start()
