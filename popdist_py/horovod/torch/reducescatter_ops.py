"""Horovod's reducescatter, which reduces tensors and returns a part of the rows on each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from popdist_py.collectives import Communicator
from popdist_py.horovod.torch.allgather_ops import allgather
from popdist_py.horovod.torch.allreduce_ops import Reduction
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
    ReduceOp,
    Sum,
    Tensor,
    Tensors,
    check_op,
    check_rows,
    differentiable,
    numbered,
    started_together,
)
from popdist_py.horovod.torch.compression import Compression, Compressor, check_compression

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def _own_rows(world: Communicator, rows: int) -> slice:
    """Return the slice of rows that this rank keeps.

    If the rows cannot be divided equally, the first ranks keep one row more.
    """
    each, more = divmod(rows, world.num_instances)
    me = world.instance_index
    start = me * each + min(me, more)
    return slice(start, start + each + (me < more))


def _checked(
    name: str | None, op: ReduceOp | int | None, process_set: ProcessSet, prescale: float,
    postscale: float,
) -> Reduction:  # fmt: skip
    check_process_set(process_set)
    op = check_op(op)
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter(op={op.name}): expected Average or Sum")
    return Reduction(op, name, prescale, postscale)


def _scatter(tensor: Tensor, reduction: Reduction) -> Call:
    """Return a ``Call`` that reduces a copy of ``tensor`` and returns this rank's rows."""
    check_rows("reducescatter", tensor)
    call = reduction.of_copies("reducescatter", [tensor])
    own = _own_rows(call.world, len(tensor))
    return replace(call, name="reduce_scatter").then(lambda reduced: reduced[0][own].clone())


class _ReduceScatter(torch.autograd.Function):
    """The autograd function of ``reducescatter``.

    The backward pass gathers the gradients of all ranks' rows on every rank.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        rows: Tensor = _scatter(tensor, reduction).now()
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduction: Reduction = ctx.reduction
        # The gradient of a sum is multiplied by the number of ranks. Programs later average the
        # gradients of all ranks, which divides them by this number.
        times = communicator().num_instances if reduction.op is Sum else 1
        return allgather(gradients[0] * (times * reduction.prescale * reduction.postscale)), None


def _new_rows(tensor: Tensor, compression: type[Compressor], reduction: Reduction) -> Tensor:
    check_rows("reducescatter", tensor)
    check_compression(compression)
    small, saved = compression.compress(tensor)
    return compression.decompress(differentiable(_ReduceScatter, small, reduction), saved)


def _in_group(reduction: Reduction, tensors: Tensors) -> list[tuple[Tensor, Reduction]]:
    """Return each tensor of a group, with a copy of ``reduction`` that has the tensor's name."""
    names = numbered("grouped_reducescatter", reduction.name, len(tensors))
    return [(x, replace(reduction, name=each)) for x, each in zip(tensors, names, strict=True)]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks and return this rank's rows of the result.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks. If the number of its rows is
            not a multiple of the number of ranks, the first ranks get one row more.
        name: All ranks must pass the same name.
        compression: The compressor, which converts the tensor before and after the reduction.
        op: The reduction operator, Average (the default) or Sum.
        process_set: Only ``global_process_set`` is accepted.
        prescale_factor: The tensor is multiplied by this factor before the reduction.
        postscale_factor: The result is multiplied by this factor.
    """
    reduction = _checked(name, op, process_set, prescale_factor, postscale_factor)
    return _new_rows(tensor, compression, reduction)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``reducescatter`` and return a handle, whose ``wait`` returns the result."""
    reduction = _checked(name, op, process_set, prescale_factor, postscale_factor)
    return _scatter(tensor, reduction).start()


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors as ``reducescatter`` does."""
    reduction = _checked(name, op, process_set, prescale_factor, postscale_factor)
    return [_new_rows(x, compression, each) for x, each in _in_group(reduction, tensors)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``grouped_reducescatter`` and return a handle, whose ``wait`` returns the result."""
    reduction = _checked(name, op, process_set, prescale_factor, postscale_factor)
    return started_together([_scatter(x, each) for x, each in _in_group(reduction, tensors)])
