"""A tensor as the array that travels, and back.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import BFLOAT16, Array

__all__ = ["array_of", "copy_back", "for_writing"]


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous CPU tensor as an array; of another one, a copy of it."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy().view(BFLOAT16)
        return array
    return tensor.numpy()


def for_writing(tensor: torch.Tensor) -> tuple[Array, bool]:
    """Return an array to receive a result, and whether ``copy_back`` must follow."""
    array = array_of(tensor)
    return array, array.ctypes.data != tensor.data_ptr() and tensor.numel() > 0


def copy_back(array: Array, tensor: torch.Tensor) -> None:
    """Write an array of as many elements to a tensor of any strides."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if tensor.dtype is torch.bfloat16:
        source = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    else:
        source = torch.from_numpy(flat)
    tensor.detach().copy_(source.view(tensor.shape))


def stacked(tensors: Sequence[torch.Tensor]) -> Array:
    """Return tensors of one shape and dtype, one after the other."""
    arrays: list[Any] = [array_of(tensor) for tensor in tensors]
    return np.stack(arrays)
