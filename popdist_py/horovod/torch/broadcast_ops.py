"""Horovod's broadcast, which sends the tensor of one rank (the root) to all ranks."""

from __future__ import annotations

from typing import Any

import torch

from popdist_py.horovod.torch.allreduce_ops import allreduce
from popdist_py.horovod.torch.basics import (
    ProcessSet,
    check_process_set,
    communicator,
    global_process_set,
)
from popdist_py.horovod.torch.calls import (
    Average,
    Call,
    Handle,
    Tensor,
    check_tensor,
    checked_copy,
    differentiable,
    is_root,
    leaf_of,
)
from popdist_py.public_collectives import leaf_arrays

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def _overwrite(tensor: Tensor, root_rank: int, name: str | None) -> Call:
    """Return a ``Call`` that overwrites ``tensor`` with the tensor of the root."""
    check_tensor("broadcast", tensor)
    world, sends = communicator(), is_root("broadcast", root_rank)
    array, result = leaf_of("broadcast", leaf_arrays.movable(tensor, needs_writing=not sends))

    def finish(_: None) -> Tensor:
        if not sends:
            result()
        return tensor

    name = name or ""
    return Call(world, "broadcast", lambda: world.broadcast(array, root_rank, name), finish, [name])


class _Broadcast(torch.autograd.Function):
    """The autograd function of ``broadcast``.

    In the backward pass, the root gets the average of all ranks' gradients. The other ranks get
    zeros as gradients.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank = root_rank
        received: Tensor = _overwrite(checked_copy("broadcast", tensor), root_rank, name).now()
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = allreduce(gradients[0], op=Average)
        sent = is_root("broadcast", ctx.root_rank)
        return (reduced if sent else torch.zeros_like(reduced)), None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of rank ``root_rank`` as a new tensor, with gradients for autograd.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks.
        root_rank: The rank whose tensor is sent to all ranks.
        name: All ranks must pass the same name.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: ``root_rank`` is not a rank of the job.
        CollectiveMismatchError: The ranks passed different shapes, dtypes, roots or names.
    """
    check_process_set(process_set)
    check_tensor("broadcast", tensor)
    received: Tensor = differentiable(_Broadcast, tensor, root_rank, name)
    return received


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the tensor of rank ``root_rank`` and return it."""
    check_process_set(process_set)
    received: Tensor = _overwrite(tensor, root_rank, name).now()
    return received


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``broadcast`` and return a handle, whose ``wait`` returns the result."""
    return broadcast_async_(checked_copy("broadcast", tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``broadcast_`` and return a handle.

    Do not use the tensor before ``synchronize`` has returned.
    """
    check_process_set(process_set)
    return _overwrite(tensor, root_rank, name).start()
