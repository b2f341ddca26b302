"""Random cases of collective calls, with the inputs of each instance and the results by NumPy.

This module does not communicate, and does not call the library.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# NumPy lacks these dtypes of torch, and uses another dtype for their bits.
BITS = {"bfloat16": "u2", "float8_e5m2": "u1", "float8_e4m3fn": "u1", "complex32": "u4"}
RECORD = "i4,f8"
NUMBERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
           "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip
OF_NUMPY = (*NUMBERS, "longdouble", "clongdouble", ">f4", ">i8")
OF_TORCH = (*NUMBERS, "bfloat16")
ONLY_MOVED_BY_NUMPY = ("M8[s]", "S3", "U2", RECORD)
ONLY_MOVED_BY_TORCH = ("float8_e5m2", "float8_e4m3fn", "complex32")
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
FUNCTIONS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum,
             "prod": np.multiply, **BITWISE}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One collective call of all instances of a group.

    Attributes:
        call: Name of a function of ``CALLS`` or ``TORCH_CALLS``.
        dtype: Name of the element type.
        shape: Shape of the array of an instance; some calls lengthen its first dimension.
        op: The operation of a reduction.
        layouts: The layout of the array in memory; instances take the two in turn.
        values: How the elements are drawn.
        root: Position of the root in the group.
        group: The instances that make the call; empty for all.
        as_torch: Whether the values are tensors of torch.
        is_async: Whether the call runs in the background.
        seed: Seed of all values.
    """

    call: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    op: str = "sum"
    layouts: tuple[str, str] = ("contiguous", "contiguous")
    values: str = "small"
    root: int = 0
    group: tuple[int, ...] = ()
    as_torch: bool = False
    is_async: bool = False
    seed: int = 0


class DifferenceError(Exception):
    """A result differs from the result by NumPy, or a call has changed its input."""


# --- Values ---------------------------------------------------------------------------------------


def storage(name: str) -> np.dtype[Any]:
    """Return the dtype of NumPy that holds the elements, or their bits."""
    return np.dtype(BITS.get(name, name))


@functools.lru_cache(maxsize=32)
def elements(case: Case, instance: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the input elements of an instance, in the dtype of ``storage``."""
    rng = np.random.default_rng([case.seed, instance])
    size, dtype = math.prod(shape), storage(case.dtype)
    found = _elements(case, rng, size, dtype).reshape(shape)
    if case.layouts[instance % 2] == "expanded" and shape and shape[0]:
        found = np.broadcast_to(found[:1], shape).copy()
    found.flags.writeable = False
    return found


def _elements(case: Case, rng: Any, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(dtype)
    if case.dtype == RECORD:
        found = np.zeros(size, dtype)
        found["f0"], found["f1"] = rng.integers(0, 99, (2, size))
        return found
    if dtype.kind in "MSU":
        return rng.integers(0, 99, size).astype(dtype)
    if dtype.kind == "c":
        # Libraries differ in products of complex infinities.
        small = "small" if case.op == "prod" else case.values
        real = np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}")
        return _floats(small, rng, 2 * size, real).view(dtype)
    if case.dtype == "bfloat16":
        floats = torch.from_numpy(_floats(case.values, rng, size, np.dtype("f4"))).bfloat16()
        return floats.view(torch.int16).numpy().view(dtype)
    if dtype.kind == "f":
        return _floats(case.values, rng, size, dtype)
    if case.values == "small" and case.dtype not in BITS:
        return rng.integers(0 if dtype.kind == "u" else -3, 4, size).astype(dtype)
    found = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()
    if case.values == "special" and case.dtype not in BITS:
        limits = np.iinfo(dtype)
        _replace_some(found, [limits.min, limits.max, 0, 1], rng)
    return found


def _floats(values: str, rng: Any, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    if values == "small":
        return rng.integers(-3, 4, size).astype(dtype)
    if values == "bits" and dtype.itemsize < 16:
        return np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).copy()
    found = rng.standard_normal(size).astype(dtype)
    if values == "special":
        limits = np.finfo(dtype)
        _replace_some(
            found,
            [np.nan, np.inf, -np.inf, limits.max, limits.min, limits.smallest_subnormal, -0.0, 0.0],
            rng,
        )
    return found


def _replace_some(found: np.ndarray, values: list[Any], rng: Any) -> None:
    chosen = np.array(values, found.dtype)[rng.integers(0, len(values), found.size)]
    np.copyto(found, chosen, where=rng.random(found.size) < 0.5)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def as_tensor(array: np.ndarray, name: str) -> torch.Tensor:
    """Return a tensor that shares the memory of an array of ``storage(name)``."""
    if name not in BITS:
        return torch.from_numpy(array)
    bits = array.view({1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize])
    return torch.from_numpy(bits).view(torch_dtype(name))


def plain(x: Any, name: str) -> np.ndarray:
    """Return the elements of an array or a tensor in the dtype of ``storage``."""
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if name in BITS:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
        return x.view(bits).numpy().view(storage(name))
    return x.numpy()


def bits_of(array: np.ndarray) -> bytes:
    """Return the bytes of all elements, without the padding of long doubles."""
    if array.dtype.kind in "fc" and array.dtype.itemsize in (16, 32) and array.dtype.char in "gG":
        return (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, 16)[:, :10].tobytes()
        )
    return array.tobytes()


_UNEVEN = {"all_gather_object", "gather_object", "broadcast_object", "hvd_allgather",
           "torch_all_gather_uneven", "torch_all_gather_object"}  # fmt: skip
_MULTIPLE = {"reduce_scatter", "torch_reduce_scatter_single", "torch_reduce_scatter",
             "torch_scatter", "torch_all_to_all_single"}  # fmt: skip


def shape_of(case: Case, instance: int, count: int) -> tuple[int, ...]:
    """Return the shape of the array of an instance."""
    if not case.shape:
        return ()
    first, *others = case.shape
    if case.call in _UNEVEN:
        first += int(np.random.default_rng([case.seed, instance, 1]).integers(0, 3))
    elif case.call in _MULTIPLE:
        first *= count
    return (first, *others)


# --- Layouts --------------------------------------------------------------------------------------


def laid_out(
    own: np.ndarray, layout: str, case: Case, window: np.ndarray | None
) -> tuple[np.ndarray, Any]:
    """Return the memory of an array or tensor, and the array or tensor with the elements ``own``.

    Args:
        own: The elements.
        layout: The order of the elements in memory.
        case: The case that the elements belong to.
        window: Memory of ``gradient_buffer()``, for the layout ``window``.
    """
    is_conjugate = layout == "conj" and own.dtype.kind == "c"
    if layout == "expanded" and own.ndim and len(own) > 1:
        base = own[:1].copy()
        if case.as_torch:
            return base, as_tensor(base, case.dtype).expand(own.shape)
        return base, np.broadcast_to(base, own.shape)
    base, view = _memory(own, layout, window)
    view[...] = own.conj() if is_conjugate else own
    if layout == "read_only":
        view.flags.writeable = False
    if not case.as_torch:
        return base, view
    tensor = as_tensor(view, case.dtype)
    if is_conjugate:
        tensor = tensor.conj()
    if layout == "requires_grad" and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_()
    return base, tensor


def _memory(
    own: np.ndarray, layout: str, window: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return new memory, and the array in it that has the shape and the dtype of ``own``."""
    if layout == "window":
        base = window[: own.nbytes].view(own.dtype).reshape(own.shape)
        return base, base
    if layout == "strided" and own.ndim:
        base = np.zeros((*own.shape[:-1], 2 * own.shape[-1]), own.dtype)
        return base, base[..., ::2]
    if layout == "transposed":
        base = np.empty(own.shape[::-1], own.dtype)
        return base, base.T
    if layout == "unaligned":
        base = np.zeros(own.nbytes + 1, np.uint8)
        return base, base[1:].view(own.dtype).reshape(own.shape)
    base = np.empty_like(own)
    return base, base[::-1] if layout == "reversed" and own.ndim else base


# --- Results by NumPy ----------------------------------------------------------------------------


def widened(array: np.ndarray, name: str) -> np.ndarray:
    """Return values in the dtype that the library uses for sums."""
    if name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if name == "float16":
        return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="))


def rounded(total: np.ndarray, name: str) -> np.ndarray:
    """Return a sum after its conversion to the dtype of the case, as ``widened`` does."""
    if name == "bfloat16":
        return torch.from_numpy(np.asarray(total)).bfloat16().float().numpy()
    return total.astype(np.float16).astype(np.float32) if name == "float16" else total


def orders(rows: Sequence[np.ndarray], function: Callable[..., Any]) -> Iterator[np.ndarray]:
    """Yield the results of all orders of the reduction. The order of the rows comes first."""
    yield functools.reduce(function, rows)
    if len(rows) > 2:
        yield from _trees(tuple(range(len(rows))), rows, function)


def _trees(
    leaves: tuple[int, ...], rows: Sequence[np.ndarray], function: Callable[..., Any]
) -> Iterator[np.ndarray]:
    if len(leaves) == 1:
        yield rows[leaves[0]]
        return
    first, rest = leaves[0], leaves[1:]
    for size in range(len(rest)):
        for more in itertools.combinations(rest, size):
            left, right = (first, *more), tuple(leaf for leaf in rest if leaf not in more)
            for one in _trees(left, rows, function):
                for other in _trees(right, rows, function):
                    yield function(one, other)


def reductions(case: Case, rows: Sequence[np.ndarray], truncates: bool) -> Iterator[np.ndarray]:
    """Yield the result by NumPy for each order of the reduction."""
    for total in orders([widened(row, case.dtype) for row in rows], FUNCTIONS[case.op]):
        if case.op == "mean" and truncates and total.dtype.kind in "iu":
            count = total.dtype.type(len(rows))
            quotient = np.asarray(total // count)
            quotient[(total % count != 0) & (total < 0)] += 1
            yield quotient
        elif case.op == "mean":
            yield rounded(np.divide(total, len(rows)), case.dtype)
            if case.call.startswith("torch_") and total.dtype.kind == "c":
                # torch.distributed passes complex numbers to a process group as pairs of floats.
                quotient = np.empty_like(total)
                quotient.real, quotient.imag = total.real / len(rows), total.imag / len(rows)
                yield quotient
        if case.op != "mean" or len(rows) == 1:  # NumPy's complex infinity / 1 is NaN
            yield rounded(total, case.dtype)


def equal_elements(a: np.ndarray, b: np.ndarray, *, with_signs: bool) -> np.ndarray:
    """Tell for each element whether two values are equal or both NaN."""
    if a.dtype.kind == "c":
        return equal_elements(a.real, b.real, with_signs=with_signs) & equal_elements(
            a.imag, b.imag, with_signs=with_signs
        )
    equal = np.asarray(a == b)
    if a.dtype.kind == "f":
        if with_signs:
            equal &= np.signbit(a) == np.signbit(b)
        equal |= np.isnan(a) & np.isnan(b)
    return equal


def excerpt(found: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> str:
    places = np.argwhere(wrong)[:4]
    parts = [
        f"{tuple(p.tolist())}: {found[tuple(p)]!r}, not {expected[tuple(p)]!r}" for p in places
    ]
    return f"{int(wrong.sum())} of {wrong.size} elements differ, " + "; ".join(parts)
