"""What a call of torch.distributed is given, checked before anything is sent.

The words are those of the other back ends where programs know them. Nothing here moves data.
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
    """A call was given what it does not accept; the other back ends raise a RuntimeError."""


def check_tensors(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require at least one tensor, all of them dense and in the memory of the CPU.

    Raises:
        ArgumentError: this is not so.
    """
    if not tensors:
        raise ArgumentError(f"{call}: requires non-empty tensor list")
    for tensor in tensors:
        if not has_array(tensor):
            raise ArgumentError(
                f"{call}: only supports dense CPU tensors, got one of {tensor.layout} of "
                f"{tensor.dtype} on {tensor.device}; move it with tensor.cpu(), or use another "
                "back end for its device"
            )


def check_written(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require tensors that can receive a result: no two elements of a tensor share memory.

    Raises:
        ArgumentError: elements of a tensor share memory.
    """
    for tensor in tensors:
        if has_overlap(tensor):
            raise ArgumentError(
                f"{call}: got a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, whose elements share memory, as after expand() or "
                "as_strided(), and cannot receive a result: give a clone()"
            )


def check_reduced(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Require tensors that can be reduced in place: no two elements of all tensors share memory.

    Raises:
        ArgumentError: elements of a tensor, or of two tensors, share memory.
    """
    check_written(call, tensors)
    overlap = first_overlap([place_of(tensor) for tensor in tensors]) if len(tensors) > 1 else None
    if overlap is not None:
        first, second = overlap
        raise ArgumentError(
            f"{call}: the tensors {first} and {second} of the call overlap in memory, and would be "
            f"reduced twice there: give a clone() of tensor {second}"
        )


def check_single(call: str, what: str, values: Sequence[object]) -> None:
    """Require one value: a process has one tensor, or one list of them, in each call.

    Raises:
        ArgumentError: there are none or several.
    """
    if len(values) != 1:
        raise ArgumentError(f"{call}: requires a single-element {what} list, got {len(values)}")


def check_list(call: str, what: str, tensors: Sequence[object], size: int) -> None:
    """Require a tensor for each rank of the group.

    Raises:
        ArgumentError: there are more or fewer.
    """
    if len(tensors) != size:
        raise ArgumentError(
            f"{call}: Incorrect {what} list size {len(tensors)}. "
            f"{what.capitalize()} list size should be {size}, same as size of the process group."
        )


def check_like(
    call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, *, any_size: bool = False
) -> None:
    """Require the dtype and the number of elements of another tensor.

    Raises:
        ArgumentError: a tensor has others.
    """
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise ArgumentError(
                f"{call}: invalid tensor type at index {index} "
                f"(expected {like.dtype}, got {tensor.dtype})"
            )
        if not any_size and tensor.numel() != like.numel():
            raise ArgumentError(
                f"{call}: invalid tensor size at index {index} "
                f"(expected {tuple(like.shape)}, got {tuple(tensor.shape)})"
            )


def check_multiple(call: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Require a tensor that holds one part for each rank.

    Raises:
        ArgumentError: its size or its dtype is a different one.
    """
    check_like(call, [whole], part, any_size=True)
    if whole.numel() != size * part.numel():
        raise ArgumentError(
            f"{call}: input tensor size must be equal to world_size times output tensor size, or "
            f"the other way round: got {tuple(whole.shape)} for {counted(size, 'rank')} with "
            f"{tuple(part.shape)}"
        )


def check_root(call: str, root: int, size: int) -> None:
    """Require a rank of the group.

    Raises:
        ArgumentError: there is no such rank.
    """
    if not 0 <= root < size:
        raise ArgumentError(f"{call}: invalid root rank: {root}, expected 0 to {size - 1}")


def row_of_root(
    call: str, what: str, rows: Sequence[list[torch.Tensor]], like: torch.Tensor, size: int
) -> list[torch.Tensor]:
    """Return the tensors that only the root gives.

    Args:
        call: as users know it.
        what: the list is, ``input`` or ``output``.
        rows: what the rank gives: one list, or nothing.
        like: each of the tensors is like this one.
        size: number of tensors; 0 where the rank is not the root.

    Raises:
        ArgumentError: the root gives others, or another rank gives some.
    """
    if size == 0:
        if rows and rows[0]:
            raise ArgumentError(f"{call}: requires empty {what} on non-root")
        return []
    check_single(call, what, rows)
    check_list(call, what, rows[0], size)
    check_tensors(call, rows[0])
    check_like(call, rows[0], like)
    return rows[0]


def blocks(call: str, tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Cut the first dimension into ``count`` blocks, equal ones if no sizes are given.

    Raises:
        ArgumentError: the sizes do not fit the tensor.
    """
    length = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if tensor.dim() == 0 or length % count:
            raise ArgumentError(
                f"{call}: Tensor's dim 0 does not divide equally across group size: "
                f"got {tuple(tensor.shape)} for {counted(count, 'rank')}"
            )
        sizes = [length // count] * count
    if len(sizes) != count:
        raise ArgumentError(
            f"{call}: Number of tensor splits not equal to group size: {len(sizes)}, not {count}"
        )
    if sum(sizes) != length or min(sizes) < 0:
        raise ArgumentError(
            f"{call}: Split sizes doesn't match total dim 0 size: {list(sizes)} of {length}"
        )
    return list(tensor.split(list(sizes)))
