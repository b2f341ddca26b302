"""Conversion of arrays, tensors and numbers to NumPy arrays for a collective, and back.

A torch tensor is converted into an array that shares the tensor's memory. This module neither
communicates nor imports torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from popdist_py.collectives import ReduceOp
from popdist_py.collectives.arithmetic import BFLOAT16, Array, check_dtype, dtype_name
from popdist_py.collectives.overlaps import elements_overlap

_REDUCIBLE = "expected a number, an array or a tensor"
_OVERLAPPING = "whose elements share memory, as after expand() or as_strided(): pass its "
_MOVABLE_TENSORS = "expected a dense tensor of booleans, integers, or floats of 16 bits or more"


# Pairs of an operation and a dtype that ``check_dtype`` has already accepted.
_REDUCED_BEFORE: set[tuple[ReduceOp, np.dtype[Any]]] = set()


class Leaf(NamedTuple):
    """One array, tensor or number in a collective call.

    Attributes:
        array: A C-contiguous array, which the call changes in place. If the value cannot be used in
            the call, ``array`` is None and ``refusal`` contains the reason.
        result: A function that returns the result for the program, after the call has changed
            ``array``.
        refusal: The error for a value that cannot be used, such as "a str, 'abc': expected a
            number".
        is_number: Whether the value is a number instead of an array.
        same_as: The path of an earlier leaf of the container that has the same memory, such as a
            tied weight. The call reduces only the earlier leaf.
    """

    array: Array | None
    result: Callable[[], Any]
    refusal: TypeError | ValueError | None = None
    is_number: bool = False
    same_as: str | None = None

    @property
    def kind(self) -> str:
        """A description of the value, which the instances compare before they send data."""
        if self.array is None:
            return str(self.refusal)
        if self.same_as is not None:
            return f"the same memory as {self.same_as}"
        dtype = dtype_name(self.array.dtype)
        return f"a number ({dtype})" if self.is_number else f"{dtype} of shape {self.array.shape}"


def own_memory(x: Any, op: ReduceOp | None = None) -> Array | None:
    """Return the memory of an array or tensor as a C-contiguous, writable array, or None.

    This function is the fast path of most collective calls. If this function returns None, the
    caller must use ``movable`` or ``reducible``, which accept all values.

    Args:
        x: Any value.
        op: The operation of a reduction; None for other calls. If ``reducible`` has not accepted
            this operation with the dtype of ``x`` yet, the result is None.
    """
    if type(x) is np.ndarray:
        array: Array = x
    elif is_tensor(x):
        try:
            array = _memory_of(x)
        except (RuntimeError, TypeError):  # such as a sparse tensor, or one on another device
            return None
    else:
        return None
    if not array.flags.carray or array.dtype.hasobject:
        return None
    try:
        return array if op is None or (op, array.dtype) in _REDUCED_BEFORE else None
    except TypeError:  # an operation that cannot be hashed is not valid
        return None


def reducible(x: Any, op: ReduceOp, *, needs_writing: bool = True) -> Leaf:
    """Return ``x`` as a leaf that can be reduced.

    The array of the leaf shares the memory of ``x`` if ``x`` is a contiguous array or CPU tensor.
    Otherwise the array of the leaf is a copy.
    """
    if isinstance(x, np.ndarray):
        leaf = _of_array(x, needs_writing=needs_writing)
    elif is_tensor(x):
        leaf = _of_tensor(x, needs_writing=needs_writing)
    else:
        return _of_number(x, op)
    try:
        if leaf.array is not None:
            check_dtype(op, leaf.array.dtype)
            _REDUCED_BEFORE.add((op, leaf.array.dtype))
    except TypeError as error:
        return _refused(TypeError(f"{'a tensor' if is_tensor(x) else 'an array'} with {error}"))
    return leaf


def marking_repeats(given: Iterable[tuple[str, Leaf]]) -> list[tuple[str, Leaf]]:
    """Return the paths and leaves, with ``same_as`` set in each repeated leaf.

    A leaf is repeated if an earlier leaf has the same memory. If two leaves share only a part of
    their memory, one of them is refused, because the shared part would be reduced twice. A leaf
    whose array is a copy shares no memory with other leaves. All copies are made before the first
    reduction, so no copy contains reduced values.
    """
    marked: list[tuple[str, Leaf]] = []
    paths: dict[tuple[int, int], str] = {}
    spans: list[tuple[int, int, int]] = []  # first address, end address, index of the leaf
    for path, leaf in given:
        if leaf.array is not None and leaf.array.size and not leaf.is_number:
            begin, size = leaf.array.__array_interface__["data"][0], leaf.array.nbytes
            first = paths.setdefault((begin, size), path)
            if first is path:
                spans.append((begin, begin + size, len(marked)))
            else:
                leaf = leaf._replace(same_as=first)
        marked.append((path, leaf))
    spans.sort()
    farthest = 0
    for index in range(1, len(spans)):
        begin, _, number = spans[index]
        if spans[farthest][1] < spans[index - 1][1]:
            farthest = index - 1
        if begin < spans[farthest][1]:
            later, earlier = sorted((number, spans[farthest][2]), reverse=True)
            path, leaf = marked[later]
            marked[later] = path, leaf._replace(array=None, refusal=_overlap(marked[earlier][0]))
    return marked


def _overlap(path: str) -> ValueError:
    return ValueError(
        f"an array that overlaps {path} in memory, so the common elements would be reduced twice: "
        "pass a copy of the array"
    )


def movable(x: Any, *, needs_writing: bool) -> Leaf | None:
    """Return ``x`` as a leaf to send; return None if ``x`` is neither an array nor a tensor."""
    if isinstance(x, np.ndarray):
        return _of_array(x, needs_writing=needs_writing)
    return _of_tensor(x, needs_writing=needs_writing) if is_tensor(x) else None


def is_tensor(x: Any) -> bool:
    """Tell whether ``x`` is a torch tensor. This function does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def mark_changed(x: Any) -> None:
    """Inform autograd of a tensor's new values, because autograd cannot detect writes by NumPy."""
    if not x.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(x)


def divide_rounding_to_zero(x: Any, divisor: int) -> None:
    """Divide a tensor of integers in place, and round the quotients towards zero."""
    torch = sys.modules["torch"]
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot divide these dtypes
        quotients = x.clone()
        array = quotients.numpy()
        np.floor_divide(array, np.array(divisor, array.dtype), out=array)
        x.copy_(quotients)
    else:
        x.div_(divisor, rounding_mode="trunc")


def tensor_like(x: Any, array: Array) -> Any:
    """Return ``array`` as a tensor with the dtype and device of the tensor ``x``.

    On the CPU, the tensor shares the memory of the array.
    """
    torch = sys.modules["torch"]
    if x.dtype == torch.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if x.is_cpu else tensor.to(x.device)  # even without a copy, to() takes 0.2 us


def bytes_of(tensor: Any) -> Array:
    """Return a flat array of bytes that shares the memory of a contiguous CPU tensor."""
    return np.asarray(_Memory(tensor, "|u1", (tensor.nbytes,)))


def _refused(refusal: TypeError | ValueError) -> Leaf:
    return Leaf(None, lambda: None, refusal)


def _of_number(x: Any, op: ReduceOp) -> Leaf:
    is_numpys = isinstance(x, np.generic)
    if not (isinstance(x, bool | int | float) or (is_numpys and x.dtype.kind in "biufc")):
        text = f", {x!r:.40}" if isinstance(x, str | bytes) else ""
        return _refused(TypeError(f"a {type(x).__name__}{text}: {_REDUCIBLE}"))
    dtype: Any = x.dtype if is_numpys else float if isinstance(x, float) else np.int64
    if op == "mean" and np.dtype(dtype).kind in "biu":
        dtype = np.float64
    try:
        array = np.array([x], dtype)
    except OverflowError:
        return _refused(ValueError("an int of more than 64 bits: pass a float"))
    return Leaf(array, lambda: array[0] if is_numpys else array[0].item(), is_number=True)


def _of_array(x: Array, *, needs_writing: bool) -> Leaf:
    if needs_writing and not x.flags.writeable:
        return _refused(ValueError("a read-only array: pass a copy of the array"))
    if x.dtype.hasobject:
        return _refused(TypeError("an array of Python objects: expected an array of numbers"))
    if x.flags.c_contiguous:
        return Leaf(x, lambda: x)
    if needs_writing and elements_overlap(x.shape, [stride // x.itemsize for stride in x.strides]):
        return _refused(ValueError(f"an array {_OVERLAPPING}copy()"))
    contiguous = x.copy(order="C")

    def result() -> Array:
        if needs_writing:
            x[...] = contiguous
        return x

    return Leaf(contiguous, result)


def _of_tensor(x: Any, *, needs_writing: bool) -> Leaf:
    detached = x.detach()
    try:
        contiguous = detached.cpu().resolve_conj().resolve_neg().contiguous()
        array = _array_of(contiguous)
    except (RuntimeError, TypeError):
        what = f"a tensor of {x.dtype} with layout {x.layout} on device {x.device}"
        return _refused(TypeError(f"{what}: {_MOVABLE_TENSORS}"))
    is_copy = needs_writing and contiguous.data_ptr() != detached.data_ptr()
    if is_copy and elements_overlap(detached.shape, detached.stride()):
        return _refused(ValueError(f"a tensor {_OVERLAPPING}clone()"))

    def result() -> Any:
        if is_copy:
            detached.copy_(contiguous)
        elif needs_writing:
            mark_changed(x)
        return x

    return Leaf(array, result)


def _array_of(tensor: Any) -> Array:
    """Return an array that shares the memory of a contiguous tensor."""
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bfloat16:
        return _memory_of(tensor.view(torch.int16)).view(BFLOAT16)
    return _memory_of(tensor)


def _memory_of(tensor: Any) -> Array:
    """Return an array that shares the memory of a tensor.

    PyTorch's FSDP resizes the storage of tensors, which is not possible after a call of
    ``tensor.numpy()``. So ``numpy()`` is used only for special tensors, such as tensors that are
    not contiguous, and for subclasses of Tensor. A tensor of a subclass may not have memory of its
    own.

    Raises:
        RuntimeError, TypeError: NumPy cannot use the memory of the tensor.
    """
    torch = sys.modules["torch"]
    array: Array
    if (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    ):
        array = np.asarray(_Memory(tensor, _type_text(tensor.dtype), tuple(tensor.shape)))
    else:
        array = tensor.detach().numpy()
    return array


@functools.cache
def _type_text(dtype: Any) -> str:
    """Return the NumPy name of a torch dtype.

    Raises:
        TypeError: NumPy does not have this dtype.
    """
    return str(sys.modules["torch"].empty(0, dtype=dtype, device="cpu").numpy().dtype.str)


class _Memory:
    """The memory of a contiguous tensor, with the array interface of NumPy.

    A NumPy array that is made from this object holds a reference to this object. This object holds
    a reference to the tensor, so the memory stays allocated.

    Args:
        tensor: A contiguous tensor in the memory of this process.
        type_text: The NumPy name of the dtype.
        shape: The shape of the array.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, type_text: str, shape: tuple[int, ...]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": type_text,
            "shape": shape,
            "data": (tensor.data_ptr(), False),
        }
