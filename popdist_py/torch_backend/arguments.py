"""Checks of the arguments of a torch.distributed call, made before data is sent.

Some error messages have the same wording as those of torch's own back ends, because programs may
search for this wording.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from popdist_py.collectives.overlaps import first_overlap
from popdist_py.errors import counted
from popdist_py.torch_backend.tensors import has_array, has_overlap, place_of

__all__ = [
    "ArgumentError",
    "blocks",
    "check_like",
    "check_list",
    "check_multiple",
    "check_reduced",
    "check_root",
    "check_single",
    "check_tensors",
    "check_written",
    "row_of_root",
]


class ArgumentError(ValueError, RuntimeError):
    """A call got an invalid argument.

    The class is also a RuntimeError, because torch's own back ends raise RuntimeErrors.
    """


def check_tensors(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require at least one tensor, and require that all tensors are dense CPU tensors.

    Raises:
        ArgumentError: The list is empty, or a tensor is not a dense CPU tensor.
    """
    if not tensors:
        raise ArgumentError(f"{call}: requires non-empty tensor list, got no tensor")
    for tensor in tensors:
        if not has_array(tensor):
            raise ArgumentError(
                f"{call}: only supports dense CPU tensors, got a tensor of layout {tensor.layout} "
                f"and dtype {tensor.dtype} on device {tensor.device}. Call tensor.to_dense() and "
                "tensor.cpu(), or use another back end"
            )


def check_written(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require that no two elements of a tensor share memory, so that it can receive a result.

    Raises:
        ArgumentError: Two elements of a tensor share memory.
    """
    for tensor in tensors:
        if has_overlap(tensor):
            raise ArgumentError(
                f"{call}: cannot write the result to a tensor of shape {tuple(tensor.shape)} and "
                f"strides {tensor.stride()}, because several elements of the tensor share memory, "
                "as after expand() or as_strided(). Pass tensor.clone()"
            )


def check_reduced(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require that no elements overlap in memory, so that the tensors can be reduced in place.

    Raises:
        ArgumentError: Two elements of one tensor, or elements of two tensors, share memory.
    """
    check_written(call, tensors)
    overlap = first_overlap([place_of(tensor) for tensor in tensors]) if len(tensors) > 1 else None
    if overlap is not None:
        first, second = overlap
        raise ArgumentError(
            f"{call}: the tensors at index {first} and index {second} of the list overlap in "
            "memory, so the common elements would be reduced twice. Pass a clone() of the tensor "
            f"at index {second}"
        )


def check_single(call: str, what: str, values: Sequence[object]) -> None:
    """Require a list of one value, because each rank passes one tensor or one list of tensors.

    Raises:
        ArgumentError: The list is empty or has several values.
    """
    if len(values) != 1:
        raise ArgumentError(
            f"{call}: requires a single-element {what} list, got {counted(len(values), 'element')}"
        )


def check_list(call: str, what: str, tensors: Sequence[object], size: int) -> None:
    """Require exactly one tensor for each rank of the group.

    Raises:
        ArgumentError: The list has more or fewer tensors than the group has ranks.
    """
    if len(tensors) != size:
        raise ArgumentError(
            f"{call}: Incorrect {what} list size {len(tensors)}. "
            f"{what.capitalize()} list size should be {size}, same as size of the process group."
        )


def check_like(
    call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, *, any_size: bool = False
) -> None:
    """Require tensors with the dtype and the number of elements of ``like``.

    With ``any_size``, only the dtypes must be equal.

    Raises:
        ArgumentError: A tensor differs from ``like`` in dtype or number of elements.
    """
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise ArgumentError(
                f"{call}: invalid tensor type at index {index} "
                f"(expected {like.dtype}, got {tensor.dtype}). All tensors of the call must have "
                "the same dtype"
            )
        if not any_size and tensor.numel() != like.numel():
            raise ArgumentError(
                f"{call}: invalid tensor size at index {index} "
                f"(expected shape {tuple(like.shape)}, got shape {tuple(tensor.shape)}). All "
                "tensors of the call must have the same number of elements"
            )


def check_multiple(call: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Require that ``whole`` has the dtype of ``part`` and ``size`` times as many elements.

    Raises:
        ArgumentError: ``whole`` has a wrong number of elements or a wrong dtype.
    """
    check_like(call, [whole], part, any_size=True)
    if whole.numel() != size * part.numel():
        raise ArgumentError(
            f"{call}: input tensor size must be equal to world_size times output tensor size, or "
            f"the other way round. Got a tensor of shape {tuple(whole.shape)} for all "
            f"{counted(size, 'rank')}, and a tensor of shape {tuple(part.shape)} for one rank"
        )


def check_root(call: str, root: int, size: int) -> None:
    """Require that ``root`` is a rank of the group.

    Raises:
        ArgumentError: The rank is out of range.
    """
    if not 0 <= root < size:
        raise ArgumentError(
            f"{call}: invalid root rank: {root}, expected a rank from 0 to {size - 1}"
        )


def row_of_root(
    call: str, what: str, rows: Sequence[list[torch.Tensor]], like: torch.Tensor, size: int
) -> list[torch.Tensor]:
    """Return the list of tensors that the root passed; on other ranks, return an empty list.

    Args:
        call: Name of the call, for messages.
        what: Name of the list in messages, ``input`` or ``output``.
        rows: The argument that this rank passed: a list with one list of tensors, or an empty list.
        like: A tensor with the expected dtype and number of elements.
        size: Expected number of tensors; 0 if this rank is not the root.

    Raises:
        ArgumentError: The root passes unexpected tensors, or another rank passes any tensors.
    """
    if size == 0:
        if rows and rows[0]:
            raise ArgumentError(
                f"{call}: requires empty {what} on non-root: only the root passes {what} tensors"
            )
        return []
    check_single(call, what, rows)
    check_list(call, what, rows[0], size)
    check_tensors(call, rows[0])
    check_like(call, rows[0], like)
    return rows[0]


def blocks(call: str, tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Split a tensor along its first dimension into ``count`` blocks.

    If ``sizes`` is empty, all blocks have equal size.

    Raises:
        ArgumentError: The sizes do not match the tensor.
    """
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if tensor.dim() == 0 or length % count:
            raise ArgumentError(
                f"{call}: Tensor's dim 0 does not divide equally across group size: "
                f"got a tensor of shape {tuple(tensor.shape)} for {counted(count, 'rank')}. Pass "
                "split sizes"
            )
        sizes = [length // count] * count
    if len(sizes) != count:
        raise ArgumentError(
            f"{call}: Number of tensor splits not equal to group size: got "
            f"{counted(len(sizes), 'split size')} for {counted(count, 'rank')}"
        )
    if sum(sizes) != length or min(sizes) < 0:
        raise ArgumentError(
            f"{call}: Split sizes doesn't match total dim 0 size: got the split sizes "
            f"{list(sizes)} for a first dimension of {length}"
        )
    return list(tensor.split(list(sizes)))
