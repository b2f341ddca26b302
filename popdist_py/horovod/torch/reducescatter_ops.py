"""reducescatter: every rank gets its rows of the reduction.

Nothing here reduces by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from popdist_py.collectives import Communicator
from popdist_py.horovod.torch.allgather_ops import allgather
from popdist_py.horovod.torch.allreduce_ops import reduction_of
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
    copy_of,
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
    """Return the rows that this rank keeps: the first ranks have one more where they are uneven."""
    each, more = divmod(rows, world.num_instances)
    me = world.instance_index
    start = me * each + min(me, more)
    return slice(start, start + each + (me < more))


def _scatter(
    tensor: Tensor, op: ReduceOp, name: str | None, prescale: float, postscale: float
) -> Call:
    check_rows("reducescatter", tensor)
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter(op={op.name}): expected Average or Sum")
    copy = copy_of(tensor)
    call = reduction_of("reducescatter", [copy], op, name, prescale, postscale)
    own = _own_rows(call.world, len(tensor))
    return replace(
        call, name="reduce_scatter", finish=lambda done: call.finish(done)[0][own].clone()
    )


class _ReduceScatter(torch.autograd.Function):
    """reducescatter; all ranks gather the gradients of their rows."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> Tensor:
        ctx.op, ctx.factor = op, prescale * postscale
        rows: Tensor = _scatter(tensor, op, name, prescale, postscale).now()
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Gradients of ranks are averaged later, as for allgather: a sum counts once for each rank.
        times = communicator().num_instances if ctx.op is Sum else 1
        return allgather(gradients[0] * (times * ctx.factor)), None, None, None, None


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
        tensor: of equal shape and dtype on all ranks; where the first dimension is no multiple of
            their number, the first ranks get one row more.
        name: compared between the ranks.
        compression: how the tensor is made smaller for its way.
        op: Average (the default) or Sum.
        process_set: must be the global one.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
    """
    check_process_set(process_set)
    check_rows("reducescatter", tensor)
    check_compression(compression)
    small, saved = compression.compress(tensor)
    rows = differentiable(
        _ReduceScatter, small, check_op(op), name, prescale_factor, postscale_factor
    )
    return compression.decompress(rows, saved)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``reducescatter`` and return a handle."""
    check_process_set(process_set)
    return _scatter(tensor, check_op(op), name, prescale_factor, postscale_factor).start()


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
    names = numbered(name or "grouped_reducescatter.noname", len(tensors))
    return [
        reducescatter(x, each, compression, op, process_set, prescale_factor, postscale_factor)
        for x, each in zip(tensors, names, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start ``grouped_reducescatter`` and return a handle."""
    check_process_set(process_set)
    op = check_op(op)
    names = numbered(name or "grouped_reducescatter.noname", len(tensors))
    return started_together(
        [
            _scatter(x, op, each, prescale_factor, postscale_factor)
            for x, each in zip(tensors, names, strict=True)
        ]
    )
