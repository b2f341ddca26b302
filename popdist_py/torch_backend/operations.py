"""Translation of torch's ``ReduceOp`` to the reductions of this library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from popdist_py.public_collectives import leaf_arrays
from popdist_py.torch_backend.arguments import ArgumentError

__all__ = ["SUM", "Operation", "operation_of"]


@dataclass(frozen=True)
class Operation:
    """A reduction of tensors over the ranks of a group.

    Attributes:
        name: Name of the reduction in ``popdist_py.collectives.arithmetic``.
        torch_name: Name of the ``ReduceOp``, for messages.
        factor: A number or a tensor by which each rank multiplies its values before the reduction;
            None for no factor.
        truncates: Whether the sum is divided by the number of ranks and rounded toward zero, as for
            the mean of integers.
    """

    name: Any  # a value of AnyReduceOp in popdist_py.collectives
    torch_name: str
    factor: Any = None
    truncates: bool = False

    def scale(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, multiplied by the factor if there is one."""
        return tensor if self.factor is None else tensor.detach() * self.factor

    def finish(self, tensor: torch.Tensor, count: int) -> None:
        """For a mean of integers, divide the tensor in place by ``count``, the number of ranks."""
        if self.truncates:
            leaf_arrays.divide_rounding_to_zero(tensor.detach(), count)


# Typed as Any because torch's stubs lack the members of the enumeration RedOpType.
_RedOp: Any = dist.ReduceOp.RedOpType
SUM = Operation("sum", "SUM")
_OPERATIONS = (
    SUM,
    Operation("mean", "AVG"),
    Operation("prod", "PRODUCT"),
    Operation("min", "MIN"),
    Operation("max", "MAX"),
    Operation("band", "BAND"),
    Operation("bor", "BOR"),
    Operation("bxor", "BXOR"),
)
_INTEGER_AVG = Operation("sum", "AVG", truncates=True)
# The keys are the numbers of RedOpType's members, because hashing the members takes longer.
_BY_NUMBER = {getattr(_RedOp, each.torch_name).value: each for each in _OPERATIONS}
_OF_BITS = frozenset({"band", "bor", "bxor"})
_ORDERED = frozenset({"min", "max"})
_MOVED_ONLY = ("float8", "float4", "complex32")


def operation_of(call: str, reduce_op: Any, tensors: Sequence[torch.Tensor]) -> Operation:
    """Return the operation for a ``ReduceOp`` and for the dtypes of the tensors.

    Args:
        call: Name of the call, for messages.
        reduce_op: A ``dist.ReduceOp``, or its ``RedOpType``.
        tensors: The tensors to reduce.

    Raises:
        TypeError: The operation is not defined for the dtype of the tensors.
        ArgumentError: The operation is unknown.
    """
    kind = getattr(reduce_op, "op", reduce_op)
    operation = _BY_NUMBER.get(kind.value) or _with_factor(call, kind, reduce_op)
    for tensor in tensors:
        if operation is not SUM or not tensor.dtype.is_floating_point or tensor.itemsize < 2:
            _check_dtype(call, operation, tensor.dtype)
    is_mean = operation.name == "mean"
    return _INTEGER_AVG if is_mean and not _has_fraction(tensors[0].dtype) else operation


def _has_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _with_factor(call: str, kind: Any, reduce_op: Any) -> Operation:
    """Return the operation PREMUL_SUM, which is the only operation with a factor.

    Raises:
        ArgumentError: The operation is not PREMUL_SUM, or lacks a factor.
    """
    if kind != _RedOp.PREMUL_SUM or kind is reduce_op:
        accepted = ", ".join(each.torch_name for each in _OPERATIONS)
        raise ArgumentError(
            f"{call}: Cannot use ReduceOp.{kind.name}: expected the operation {accepted}, "
            "or PREMUL_SUM with a factor"
        )
    # In Python, the factor of PREMUL_SUM can be read only from the pickled state of a ReduceOp.
    return Operation("sum", "PREMUL_SUM", reduce_op.__getstate__()[1])


def _check_dtype(call: str, operation: Operation, dtype: torch.dtype) -> None:
    """Raise an error unless tensors of the dtype can be reduced with the operation.

    Raises:
        TypeError: The operation is not defined for the dtype.
    """
    name = str(dtype).removeprefix("torch.")
    has_fraction = _has_fraction(dtype)
    accepted = ""
    if name.startswith(_MOVED_ONLY):
        accepted = f"a wider dtype, such as bfloat16 ({name} can be sent, but not reduced)"
    elif operation.name in _OF_BITS and has_fraction:
        accepted = "a dtype of booleans or integers"
    elif operation.name in _ORDERED and dtype.is_complex:
        accepted = "a dtype whose values have an order"
    elif operation.name == "mean" and dtype is torch.bool:
        accepted = "a dtype of numbers. Use ReduceOp.SUM and divide the result"
    elif operation.factor is not None and not has_fraction:
        accepted = "a dtype of floats"
    if accepted:
        raise TypeError(
            f"{call}: ReduceOp.{operation.torch_name} does not support the dtype {name}: expected "
            f"{accepted}"
        )
