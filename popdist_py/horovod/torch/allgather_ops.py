"""allgather and alltoall: rows of all ranks, all of them or those that are meant for this one.

The reduction of sparse tensors lives here, since it gathers. No other arithmetic does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from popdist_py.collectives import Communicator
from popdist_py.collectives.arithmetic import Array
from popdist_py.errors import counted
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
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "sparse_allreduce_async",
]


def _rows_of_all(world: Communicator, array: Array, name: str) -> list[Array]:
    """Return the array of every instance; their first dimensions may differ."""
    own = np.array([len(array)], np.int64)
    counts = [int(count) for count in world.all_gather(own, name).ravel()]
    if len(array) < max(counts):
        padded = np.zeros((max(counts), *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        array = padded
    rows = world.all_gather(array, name)
    return [rows[i, :count] for i, count in enumerate(counts)]


def _gather(tensor: Tensor, name: str | None) -> Call:
    check_rows("allgather", tensor)
    array, world = array_of("allgather", tensor), communicator()
    return Call(
        world,
        "all_gather",
        lambda: np.concatenate(_rows_of_all(world, array, name or "")),
        lambda rows: leaf_arrays.tensor_like(tensor, rows),
        [name or ""],
    )


class _AllGather(torch.autograd.Function):
    """allgather; a rank's gradient is the average of all ranks' gradients of its rows."""

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
    """Return the tensors of all ranks, one after the other along the first dimension.

    Args:
        tensor: of equal dtype and shape on all ranks, but for the first dimension.
        name: compared between the ranks.
        process_set: must be the global one.

    Raises:
        ValueError: a tensor without dimensions.
        CollectiveMismatchError: the ranks differ in dtype, the other dimensions or name.
    """
    check_process_set(process_set)
    check_rows("allgather", tensor)
    gathered: Tensor = differentiable(_AllGather, tensor, name)
    return gathered


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``allgather`` and return a handle."""
    check_process_set(process_set)
    return _gather(tensor, name).start()


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors as ``allgather`` does."""
    named = zip(tensors, numbered(name or "grouped_allgather.noname", len(tensors)), strict=True)
    return [allgather(x, each, process_set) for x, each in named]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``grouped_allgather`` and return a handle."""
    check_process_set(process_set)
    names = numbered(name or "grouped_allgather.noname", len(tensors))
    return started_together([_gather(x, n) for x, n in zip(tensors, names, strict=True)])


def _exchange(tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None) -> Call:
    """Return the call of alltoall; its result is the tensor and the received splits."""
    check_rows("alltoall", tensor)
    world = communicator()
    count, me = world.num_instances, world.instance_index
    if splits is None:
        if len(tensor) % count:
            raise ValueError(
                f"alltoall: the first dimension, {len(tensor)}, is not a multiple of the "
                f"{counted(count, 'rank')}; give splits"
            )
        parts = np.full(count, len(tensor) // count, np.int64)
    else:
        given = np.asarray(splits)
        if given.dtype.kind not in "iu":
            raise ValueError(
                f"alltoall(splits={given.tolist()}): expected whole numbers of rows, such as "
                "torch.tensor([2, 1], dtype=torch.int32)"
            )
        parts = given.astype(np.int64)
        if parts.shape != (count,) or (parts < 0).any() or parts.sum() != len(tensor):
            raise ValueError(
                f"alltoall(splits={parts.tolist()}): expected {counted(count, 'number')}, one for "
                "each rank, "
                f"that add up to {len(tensor)}, the rows of the tensor"
            )
    array = array_of("alltoall", tensor)

    def run() -> tuple[Array, Array]:
        all_parts = world.all_gather(parts, name or "")
        ends = all_parts.cumsum(axis=1)[:, me]
        received = all_parts[:, me]
        rows = _rows_of_all(world, array, name or "")
        pieces = zip(rows, ends, received, strict=True)
        return np.concatenate([own[end - n : end] for own, end, n in pieces]), received

    def finish(result: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
        rows, received = result
        return leaf_arrays.tensor_like(tensor, rows), torch.from_numpy(received.astype(np.int32))

    return Call(world, "all_to_all", run, finish, [name or ""])


class _AllToAll(torch.autograd.Function):
    """alltoall; the gradients go the way back."""

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
    """Send a block of rows to every rank, and return what came from all, in the order of ranks.

    Args:
        tensor: its first dimension is split.
        splits: rows for each rank; None splits equally.
        name: compared between the ranks.
        process_set: must be the global one.

    Returns:
        the tensor; where ``splits`` is given, also how many rows came from each rank (int32).

    Raises:
        ValueError: the splits do not fit the tensor and the ranks.
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
    """Start ``alltoall`` and return a handle."""
    check_process_set(process_set)
    call = _exchange(tensor, splits, name)

    def finish(done: Any) -> Any:
        both = call.finish(done)
        return both[0] if splits is None else both

    return replace(call, finish=finish).start()


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp | int | None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Start the reduction of a sparse tensor: indices and values of all ranks are put together.

    Args:
        tensor: sparse, in COO form.
        name: compared between the ranks.
        op: Average or Sum.
        process_set: must be the global one.

    Returns:
        a function that waits, and returns the sparse result.
    """
    if not tensor.is_sparse:
        raise TypeError(
            f"sparse_allreduce_async: a tensor of {tensor.layout}: expected torch.sparse_coo; for "
            "a dense one use allreduce_async()"
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
            indices.wait().t(),
            all_values,
            tensor.shape,
            device=tensor.device,
            check_invariants=False,
        )

    return wait
