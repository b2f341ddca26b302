"""Horovod's allgather, which returns the rows of all ranks on every rank.

This module also contains the reduction of sparse tensors, which gathers their indices and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.arithmetic import Array
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
    ReduceOp,
    Sum,
    Tensor,
    Tensors,
    array_of,
    check_op,
    check_rows,
    differentiable,
    numbered,
    started_together,
)
from popdist_py.public_collectives import leaf_arrays

__all__ = [
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "sparse_allreduce_async",
]


def gathered_rows(
    world: Communicator, array: Array, counts: Sequence[int] | Array, name: str
) -> list[Array]:
    """Return the arrays of all instances, which may have different numbers of rows.

    ``counts`` contains the number of rows of each instance's array.
    """
    # ``all_gather`` needs equal shapes on all ranks, so shorter arrays are extended with zeros.
    missing = max(counts) - len(array)
    if missing:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    rows = world.all_gather(array, name)
    return [rows[i, :count] for i, count in enumerate(counts)]


def _gather(tensor: Tensor, name: str | None) -> Call:
    check_rows("allgather", tensor)
    array, world = array_of("allgather", tensor), communicator()

    def run() -> Array:
        counts = world.all_gather(np.array([len(array)], np.int64), name or "").ravel()
        return np.concatenate(gathered_rows(world, array, counts, name or ""))

    def finish(rows: Array) -> Any:
        return leaf_arrays.tensor_like(tensor, rows)

    return Call(world, "all_gather", run, finish, [name or ""])


class _AllGather(torch.autograd.Function):
    """The autograd function of ``allgather``.

    In the backward pass, each rank gets the average of all ranks' gradients for its own rows.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None) -> Tensor:
        ctx.rows = len(tensor)
        gathered: Tensor = _gather(tensor, name).now()
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        reduced = allreduce(gradients[0], op=Average)
        rows = allgather(torch.tensor([ctx.rows], device="cpu"))
        first = int(rows[: communicator().instance_index].sum())
        return reduced.narrow(0, first, ctx.rows), None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: A tensor with the same dtype and shape on all ranks; only the size of the first
            dimension may differ.
        name: All ranks must pass the same name.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        ValueError: The tensor is a scalar.
        CollectiveMismatchError: The names, the dtypes, or the sizes of a dimension after the first
            differ between the ranks.
    """
    check_process_set(process_set)
    check_rows("allgather", tensor)
    gathered: Tensor = differentiable(_AllGather, tensor, name)
    return gathered


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``allgather`` and return a handle, whose ``wait`` returns the result."""
    check_process_set(process_set)
    return _gather(tensor, name).start()


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors as ``allgather`` does."""
    names = numbered("grouped_allgather", name, len(tensors))
    return [allgather(x, each, process_set) for x, each in zip(tensors, names, strict=True)]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``grouped_allgather`` and return a handle, whose ``wait`` returns the result."""
    check_process_set(process_set)
    names = numbered("grouped_allgather", name, len(tensors))
    return started_together([_gather(x, each) for x, each in zip(tensors, names, strict=True)])


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp | int | None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Start to reduce a sparse tensor. Each rank gathers the indices and values of all ranks.

    Args:
        tensor: A sparse tensor in COO format.
        name: All ranks must pass the same name.
        op: The reduction operator, Average or Sum.
        process_set: Only ``global_process_set`` is accepted.

    Returns:
        A function that waits for the reduction and returns the sparse result.
    """
    if not tensor.is_sparse:
        raise TypeError(
            "sparse_allreduce_async: expected a tensor of layout torch.sparse_coo, got a tensor "
            f"of layout {tensor.layout}. For a dense tensor, use allreduce_async()"
        )
    op = check_op(op)
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async(op={op.name}): expected Average or Sum")
    name = name or "sparse_allreduce.noname"
    indices = allgather_async(tensor._indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)
    num_ranks = communicator().num_instances

    def wait() -> Tensor:
        all_values = values.wait() / num_ranks if op is Average else values.wait()
        return torch.sparse_coo_tensor(
            indices.wait().t(), all_values, tensor.shape, device=tensor.device,
            check_invariants=False,
        )  # fmt: skip

    return wait
