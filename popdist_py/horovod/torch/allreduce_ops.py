"""allreduce: every rank gets the reduction of all ranks' tensors.

Nothing here gathers or sends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from popdist_py.horovod.torch.basics import (
    ProcessSet,
    check_process_set,
    communicator,
    global_process_set,
)
from popdist_py.horovod.torch.calls import (
    ARRAY_OPS,
    Average,
    Call,
    Handle,
    ReduceOp,
    Sum,
    Tensor,
    Tensors,
    check_op,
    check_tensor,
    copy_of,
    differentiable,
    leaf_of,
    mark_changed,
    numbered,
)
from popdist_py.horovod.torch.compression import Compression, Compressor, check_compression
from popdist_py.public_collectives import leaf_arrays

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _scale(x: Tensor, factor: float) -> None:
    """Multiply in place; whole numbers lose their fraction, as in Horovod."""
    if factor == 1.0:
        return
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.mul_(factor)
    else:
        x.copy_((x.double() * factor).trunc())


def reduction_of(
    call: str, tensors: Tensors, op: ReduceOp, name: str | None, prescale: float, postscale: float
) -> Call:
    """Return the call that reduces ``tensors`` in place."""
    world = communicator()
    leaves, operations = [], []
    for x in tensors:
        check_tensor(call, x)
        if op is Average and x.dtype is torch.bool:
            raise TypeError(f"{call}(op=Average): a tensor of booleans: give x.float()")
        _scale(x.detach(), prescale)
        # Arrays of whole numbers cannot receive a mean.
        is_whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
        array_op = "sum" if op is Average and is_whole else ARRAY_OPS[op]
        leaves.append(leaf_of(call, leaf_arrays.reducible(x, array_op)))
        operations.append(array_op)
    names = [name or ""] if len(tensors) == 1 else numbered(name or f"{call}.noname", len(tensors))

    def run() -> None:
        for (array, _), array_op, each in zip(leaves, operations, names, strict=True):
            world.all_reduce(array, array_op, each)

    def finish(_: None) -> Tensors:
        for x, (_array, result), array_op in zip(tensors, leaves, operations, strict=True):
            result()
            if op is Average and array_op == "sum":
                x.detach().copy_(torch.div(x.detach(), world.num_instances, rounding_mode="trunc"))
            _scale(x.detach(), postscale)
            mark_changed(x)
        return tensors

    return Call(world, "all_reduce", run, finish, names)


class _AllReduce(torch.autograd.Function):
    """allreduce of several tensors; the gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any, call: str, op: ReduceOp, name: str | None, prescale: float, postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.arguments = (call, op, prescale, postscale)
        copies = [copy_of(x) for x in tensors]
        return tuple(reduction_of(call, copies, op, name, prescale, postscale).now())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, op, prescale, postscale = ctx.arguments
        if op not in (Average, Sum):
            raise NotImplementedError(f"{call}(op={op.name}) has no gradient: use Average or Sum")
        reduced = differentiable(_AllReduce, call, op, None, prescale, postscale, *gradients)
        return (None, None, None, None, None, *reduced)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks and return the result as a new one; gradients pass through.

    Args:
        tensor: of equal shape and dtype on all ranks.
        average: deprecated: True means Average, False means Sum.
        name: compared between the ranks.
        compression: how the tensor is made smaller for its way.
        op: Average (the default), Sum, Min, Max or Product. The average of whole numbers is a
            whole number, towards 0.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: must be the global one.

    Raises:
        CollectiveMismatchError: the ranks differ in shape, dtype, operation or name.
        NotImplementedError: Adasum.
    """
    check_process_set(process_set)
    check_tensor("allreduce", tensor)
    check_compression(compression)
    op = check_op(op, average)
    small, saved = compression.compress(tensor)
    (reduced,) = differentiable(
        _AllReduce, "allreduce", op, name, prescale_factor, postscale_factor, small
    )
    return compression.decompress(reduced, saved)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place and return it; arguments as for ``allreduce``."""
    check_process_set(process_set)
    op = check_op(op, average)
    reduction_of("allreduce", [tensor], op, name, prescale_factor, postscale_factor).now()
    return tensor


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``allreduce`` and return a handle, whose ``synchronize`` returns a new tensor."""
    check_tensor("allreduce", tensor)
    copy = copy_of(tensor)
    op = check_op(op, average)
    return allreduce_async_(copy, None, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``allreduce_`` and return a handle; nobody may touch the tensor before its end."""
    check_process_set(process_set)
    op = check_op(op, average)
    call = reduction_of("allreduce", [tensor], op, name, prescale_factor, postscale_factor)
    return replace(call, finish=lambda done: call.finish(done)[0]).start()


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as ``allreduce`` does and return the results."""
    check_process_set(process_set)
    for x in tensors:
        check_tensor("grouped_allreduce", x)
    check_compression(compression)
    op = check_op(op, average)
    compressed = [compression.compress(x) for x in tensors]
    reduced = differentiable(
        _AllReduce, "grouped_allreduce", op, name, prescale_factor, postscale_factor,
        *(small for small, _ in compressed),
    )  # fmt: skip
    pairs = zip(reduced, compressed, strict=True)
    return [compression.decompress(small, saved) for small, (_, saved) in pairs]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place and return them; arguments as for ``allreduce``."""
    op = check_op(op, average)
    handle = grouped_allreduce_async_(
        tensors, None, name, op, prescale_factor, postscale_factor, process_set
    )
    return list(handle.wait())


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``grouped_allreduce``; ``synchronize`` returns new tensors."""
    for x in tensors:
        check_tensor("grouped_allreduce", x)
    copies = [copy_of(x) for x in tensors]
    op = check_op(op, average)
    return grouped_allreduce_async_(
        copies, None, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``grouped_allreduce_``; nobody may touch the tensors before its end."""
    check_process_set(process_set)
    op = check_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return reduction_of("grouped_allreduce", tensors, op, name, *factors).start()
