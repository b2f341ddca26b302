"""Conversion between tensors and the flat NumPy arrays that the collectives use.

An array shares the memory of its tensor if the tensor is contiguous. If NumPy lacks the dtype of a
tensor, the array contains the bits of the tensor's values.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from popdist_py.collectives.arithmetic import BFLOAT16, Array
from popdist_py.collectives.overlaps import Place, elements_overlap
from popdist_py.public_collectives.leaf_arrays import bytes_of

__all__ = [
    "array_of",
    "has_array",
    "has_overlap",
    "place_of",
    "shares_memory",
    "write_back",
]

# An integer type of torch and an integer type of NumPy, for each size in bytes.
_BITS: dict[int, tuple[torch.dtype, str]] = {
    1: (torch.uint8, "u1"),
    2: (torch.int16, "<u2"),
    4: (torch.int32, "<u4"),
}
_NAMES = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
)
# A substitute dtype for each torch dtype that NumPy lacks. Each substitute has a named field, so
# that its values are not mistaken for integers. Older versions of torch lack some of the dtypes in
# _NAMES.
_WITHOUT_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype([(name, _BITS[dtype.itemsize][1])])
    for name in _NAMES
    if (dtype := getattr(torch, name, None)) is not None
}
_WITHOUT_NUMPY[torch.bfloat16] = BFLOAT16


def has_array(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a dense CPU tensor that is not quantized."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def shares_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the array that ``array_of`` returns shares the tensor's memory."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def has_overlap(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of a dense tensor share memory, as after ``expand()``."""
    return not tensor.is_contiguous() and elements_overlap(tensor.shape, tensor.stride())


def place_of(tensor: torch.Tensor) -> Place:
    """Return the location of a dense CPU tensor's elements in memory."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return Place(tensor.data_ptr(), tuple(tensor.shape), strides, size)


def array_of(tensor: torch.Tensor) -> Array:
    """Return the elements of a dense CPU tensor as a flat array, without a copy if possible."""
    if not shares_memory(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes_of(tensor).view(_dtype_of(tensor.dtype))


@functools.cache
def _dtype_of(dtype: torch.dtype) -> np.dtype[Any]:
    own = _WITHOUT_NUMPY.get(dtype)
    return own if own is not None else torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def write_back(array: Array, tensor: torch.Tensor) -> None:
    """Copy an array from ``array_of`` back to its tensor, unless it shares the tensor's memory."""
    if not shares_memory(tensor):
        tensor.detach().copy_(_tensor_of(array, tensor.dtype).view(tensor.shape))


def _tensor_of(array: Array, dtype: torch.dtype) -> torch.Tensor:
    if array.dtype.fields is None:
        return torch.from_numpy(array)
    bits = array.view(f"i{array.itemsize}" if array.itemsize > 1 else np.uint8)
    return torch.from_numpy(bits).view(dtype)
