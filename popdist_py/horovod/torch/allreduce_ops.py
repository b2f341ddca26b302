"""Horovod's allreduce, which reduces the tensors of all ranks to one result on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from popdist_py.collectives import ReduceOp as ArrayOp
from popdist_py.collectives.arithmetic import Array
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
    check_names,
    check_op,
    check_tensor,
    checked_copy,
    differentiable,
    leaf_of,
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


@dataclass(frozen=True, slots=True)
class Reduction:
    """The checked arguments of a reduction.

    Attributes:
        op: The operator that combines the tensors of the ranks.
        name: The name that the program gave to the call, if any.
        prescale: The factor by which the tensors are multiplied before the reduction.
        postscale: The factor by which the results are multiplied.
    """

    op: ReduceOp
    name: str | None
    prescale: float
    postscale: float

    def in_place(self, function: str, tensors: Tensors) -> Call:
        """Return a ``Call`` that overwrites ``tensors`` with the results of their reduction.

        ``function`` is the name of the public function, for error messages. If this method raises
        an error, the tensors are unchanged.
        """
        check_names("all_reduce", self._names(function, tensors))
        return self._call(function, tensors)

    def of_copies(self, function: str, tensors: Tensors) -> Call:
        """Return a ``Call`` that reduces copies of ``tensors``."""
        return self._call(function, [checked_copy(function, x) for x in tensors])

    def _names(self, function: str, tensors: Tensors) -> list[str]:
        if len(tensors) == 1:
            return [self.name or ""]
        return numbered(function, self.name, len(tensors))

    def _array_op(self, x: Tensor) -> ArrayOp:
        # An array of integers cannot store a mean. Therefore the sum is computed, and ``finish``
        # divides it.
        return "sum" if self.op is Average and not _is_inexact(x) else ARRAY_OPS[self.op]

    def _leaf(self, function: str, x: Tensor) -> tuple[Array, Callable[[], Any]]:
        check_tensor(function, x)
        if self.op is Average and x.dtype is torch.bool:
            raise TypeError(
                f"{function}(op=Average): cannot average a tensor of booleans. Pass tensor.float()"
            )
        return leaf_of(function, leaf_arrays.reducible(x, self._array_op(x)))

    def _call(self, function: str, tensors: Tensors) -> Call:
        world = communicator()
        names = self._names(function, tensors)
        leaves = [self._leaf(function, x) for x in tensors]
        if self.prescale != 1.0:
            for x in tensors:
                _scale(x.detach(), self.prescale)
            # For a non-contiguous tensor, the array is a copy. Scaling the tensor does not change
            # this copy, so the arrays are made again.
            leaves = [self._leaf(function, x) for x in tensors]

        def run() -> None:
            for x, (array, _), each in zip(tensors, leaves, names, strict=True):
                world.all_reduce(array, self._array_op(x), each)

        def finish(_: None) -> Tensors:
            for x, (_array, result) in zip(tensors, leaves, strict=True):
                result()
                values = x.detach()
                if self.op is Average and not _is_inexact(x):
                    leaf_arrays.divide_rounding_to_zero(values, world.num_instances)
                _scale(values, self.postscale)
            return tensors

        return Call(world, "all_reduce", run, finish, names)

    def with_gradients(
        self, function: str, tensors: Tensors, compression: type[Compressor]
    ) -> list[Tensor]:
        """Return the results of the reduction as new tensors that support autograd."""
        for x in tensors:
            check_tensor(function, x)
        check_compression(compression)
        compressed = [compression.compress(x) for x in tensors]
        reduced = differentiable(_AllReduce, function, self, *(small for small, _ in compressed))
        pairs = zip(reduced, compressed, strict=True)
        return [compression.decompress(small, saved) for small, (_, saved) in pairs]


_first = itemgetter(0)


def _is_inexact(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _scale(x: Tensor, factor: float) -> None:
    """Multiply a tensor by a factor in place.

    For a tensor of integers, the products are rounded towards 0, as in Horovod.
    """
    if factor == 1.0:
        return
    if _is_inexact(x):
        x.mul_(factor)
    else:
        x.copy_((x.double() * factor).trunc())


class _AllReduce(torch.autograd.Function):
    """The autograd function of ``allreduce`` for several tensors.

    The backward pass reduces the gradients with the same operator and factors.
    """

    @staticmethod
    def forward(
        ctx: Any, function: str, reduction: Reduction, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = function, reduction
        return tuple(reduction.of_copies(function, tensors).now())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        function, reduction = ctx.arguments
        if reduction.op not in (Average, Sum):
            raise NotImplementedError(
                f"{function}(op={reduction.op.name}) has no gradient: use Average or Sum"
            )
        unnamed = replace(reduction, name=None)
        return None, None, *differentiable(_AllReduce, function, unnamed, *gradients)


def _checked(
    average: bool | None, name: str | None, op: ReduceOp | int | None, prescale: float,
    postscale: float, process_set: ProcessSet,
) -> Reduction:  # fmt: skip
    """Check the arguments of a public function, and return them as a ``Reduction``.

    Public functions must call ``_checked`` directly. Otherwise the warning about ``average`` would
    not show a line of the user's program.
    """
    check_process_set(process_set)
    return Reduction(check_op(op, average, stacklevel=4), name, prescale, postscale)


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
    """Reduce a tensor over all ranks and return the result as a new tensor, with gradients.

    Args:
        tensor: A tensor with the same shape and dtype on all ranks.
        average: This argument is deprecated. The value True selects Average, and False selects Sum.
        name: All ranks must pass the same name.
        compression: The compressor, which converts the tensor before and after the reduction.
        op: The reduction operator, Average (the default), Sum, Min, Max or Product. An average of
            integers is rounded towards 0.
        prescale_factor: The tensor is multiplied by this factor before the reduction.
        postscale_factor: The result is multiplied by this factor.
        process_set: Only ``global_process_set`` is accepted.

    Raises:
        CollectiveMismatchError: The ranks passed different shapes, dtypes, operations or names.
        NotImplementedError: Adasum is not available.
    """
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.with_gradients("allreduce", [tensor], compression)[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place and return it; ``allreduce`` describes the arguments."""
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    reduction.in_place("allreduce", [tensor]).now()
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
    """Start ``allreduce`` and return a handle; ``synchronize`` returns the new tensor."""
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.of_copies("allreduce", [tensor]).then(_first).start()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``allreduce_`` and return a handle.

    Do not use the tensor before ``synchronize`` has returned.
    """
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.in_place("allreduce", [tensor]).then(_first).start()


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
    """Reduce several tensors as ``allreduce`` does, and return the results as new tensors."""
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.with_gradients("grouped_allreduce", tensors, compression)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place and return them; ``allreduce`` describes the arguments."""
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return list(reduction.in_place("grouped_allreduce", tensors).now())


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``grouped_allreduce`` and return a handle; ``synchronize`` returns new tensors."""
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.of_copies("grouped_allreduce", tensors).start()


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start ``grouped_allreduce_`` and return a handle.

    Do not use the tensors before ``synchronize`` has returned.
    """
    reduction = _checked(average, name, op, prescale_factor, postscale_factor, process_set)
    return reduction.in_place("grouped_allreduce", tensors).start()
