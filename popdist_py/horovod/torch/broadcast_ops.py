"""broadcast: every rank gets the tensor of one.

Nothing here reduces but gradients.
"""

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
    copy_of,
    differentiable,
    is_root,
    leaf_of,
    mark_changed,
)
from popdist_py.public_collectives import leaf_arrays

__all__ = [
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
]


def _send(tensor: Tensor, root_rank: int, name: str | None) -> Call:
    """Return the call that overwrites ``tensor`` with that of the root."""
    check_tensor("broadcast", tensor)
    world, sends = communicator(), is_root("broadcast", root_rank)
    array, result = leaf_of("broadcast", leaf_arrays.movable(tensor, needs_writing=not sends))

    def finish(_: None) -> Tensor:
        if not sends:
            result()
            mark_changed(tensor)
        return tensor

    name = name or ""
    return Call(world, "broadcast", lambda: world.broadcast(array, root_rank, name), finish, [name])


class _Broadcast(torch.autograd.Function):
    """broadcast; the root gets the average of all gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root_rank = root_rank
        copy = copy_of(tensor)
        sent: Tensor = _send(copy, root_rank, name).now()
        return sent

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
    """Return the tensor of rank ``root_rank`` as a new one; gradients pass through.

    Args:
        tensor: of equal shape and dtype on all ranks.
        root_rank: whose tensor is sent.
        name: compared between the ranks.
        process_set: must be the global one.

    Raises:
        ValueError: there is no such rank.
        CollectiveMismatchError: the ranks differ in shape, dtype, root or name.
    """
    check_process_set(process_set)
    check_tensor("broadcast", tensor)
    sent: Tensor = differentiable(_Broadcast, tensor, root_rank, name)
    return sent


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with that of rank ``root_rank`` and return it."""
    check_process_set(process_set)
    sent: Tensor = _send(tensor, root_rank, name).now()
    return sent


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``broadcast`` and return a handle."""
    check_tensor("broadcast", tensor)
    copy = copy_of(tensor)
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``broadcast_`` and return a handle; nobody may touch the tensor before its end."""
    check_process_set(process_set)
    return _send(tensor, root_rank, name).start()
