"""Element-wise reduction of arrays, in one fixed order.

This module calls NumPy functions on the caller's arrays and does not communicate. Values of float16
and bfloat16 are accumulated in float32. NumPy lacks bfloat16, so an array of the dtype ``BFLOAT16``
holds the bits of bfloat16 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from popdist_py.collectives import AnyReduceOp

__all__ = [
    "BFLOAT16",
    "CHUNK_BYTES",
    "FUNCTIONS",
    "Array",
    "Reduction",
    "check_dtype",
    "dtype_name",
]

Array: TypeAlias = np.ndarray[Any, Any]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])

# The NumPy function with which each reduce operation combines two values. For booleans, "sum" means
# "any" and "prod" means "all".
# Only the process groups of torch use the bitwise operations.
FUNCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_OF_BITS = frozenset({"band", "bor", "bxor"})
# Arrays are reduced in chunks of this size, so that a chunk of each operand fits in the CPU's
# second-level cache.
CHUNK_BYTES = 256 * 1024


@cache  # NumPy takes longer to format the name of a dtype than to reduce one number
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name as PyTorch and NumPy users know it, such as "bfloat16"."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


def check_dtype(op: AnyReduceOp, dtype: np.dtype[Any]) -> None:
    """Check that the operation ``op`` is defined for arrays of a dtype.

    Raises:
        TypeError: The operation is not defined for the dtype.
    """
    if dtype.kind not in "biufc" and dtype != BFLOAT16:
        raise TypeError(f"dtype {dtype}: expected booleans, integers or floats")
    if op in _OF_BITS and dtype.kind not in "biu":
        raise TypeError(f"dtype {dtype_name(dtype)}: op={op!r} needs booleans or integers")
    # The mean may be a fraction, which an array of integers or booleans cannot hold.
    if op == "mean" and dtype.kind in "biu":
        raise TypeError(
            f"dtype {dtype}: op='mean' needs floats. Use op='sum' and divide the result"
        )


class Reduction:
    """Reduces arrays of one dtype with one operation.

    Args:
        op: The operation; ``mean`` divides by ``count``.
        dtype: Dtype of the arrays.
        count: Number of instances that take part in the reduction.

    Raises:
        TypeError: The operation is not defined for the dtype.
    """

    def __init__(self, op: AnyReduceOp, dtype: np.dtype[Any], count: int) -> None:
        self.op: AnyReduceOp = op
        self.dtype = dtype
        self.is_half = dtype in (np.float16, BFLOAT16)
        check_dtype(op, dtype)
        self.function = FUNCTIONS[op]
        self.divisor = count if op == "mean" else None
        # Whether the order of the operands may change the result.
        self.rounds = op in ("sum", "mean", "prod") and dtype.kind not in "biu"
        self.accumulate_dtype = np.dtype(np.float32) if self.is_half else dtype
        self.chunk_size = max(1, CHUNK_BYTES // self.accumulate_dtype.itemsize)
        self._scratch: tuple[Array, ...] = ()

    def widen(self, source: Array, out: Array) -> Array:
        """Return ``source`` as ``accumulate_dtype``. 16-bit floats are converted into ``out``."""
        if not self.is_half:
            return source
        if self.dtype == BFLOAT16:
            bits = out.view(np.uint32)
            np.copyto(bits, source.view(np.uint16))
            np.left_shift(bits, np.uint32(16), out=bits)
        else:
            np.copyto(out, source)
        return out

    def narrow(self, value: Array, out: Array) -> None:
        """Store ``value`` in ``out``, rounded to its dtype; ties are rounded to even."""
        if self.dtype == BFLOAT16:
            np.copyto(out.view(np.uint16), _bfloat16_bits(value))
        elif value is not out:
            np.copyto(out, value, casting="same_kind")

    def finalize(self, value: Array) -> None:
        """Divide ``value`` in place by the number of instances if the operation is ``mean``."""
        if self.divisor is not None:
            np.divide(value, self.divisor, out=value)

    def accumulate(self, sources: Iterable[Array], out: Array) -> None:
        """Reduce ``sources`` into ``out``, from the first to the last.

        ``out`` has the dtype ``accumulate_dtype`` and may be one of the first two sources. Each
        source is added before the next is taken from the iterator. So all sources except the first
        may use the same memory.
        """
        remaining, scratch = iter(sources), self._scratch_arrays(out.size)[1]
        total = next(remaining)
        if self.is_half:
            total = self.widen(total, out)
        for source in remaining:
            total = self.function(total, self.widen(source, scratch), out=out)
        if total is not out:
            np.copyto(out, total)

    def __call__(self, sources: Sequence[Array], out: Array) -> None:
        """Reduce flat ``sources``, first to last, into ``out``, which may be one of them."""
        is_later_source = any(np.may_share_memory(out, source) for source in sources[1:])
        reduce = self._reduce_apart if is_later_source else self.reduce_chunk
        for start in range(0, out.size, self.chunk_size):
            part = slice(start, start + self.chunk_size)
            reduce([source[part] for source in sources], out[part])

    def reduce_chunk(self, sources: Iterable[Array], out: Array) -> None:
        """Reduce arrays of at most ``chunk_size`` elements into ``out``, first to last."""
        if self.is_half:
            self._reduce_apart(sources, out)
            return
        remaining = iter(sources)
        total = next(remaining)
        for source in remaining:
            total = self.function(total, source, out=out)
        if total is not out:
            np.copyto(out, total)
        if self.divisor is not None:
            self.finalize(out)

    def _reduce_apart(self, sources: Iterable[Array], out: Array) -> None:
        """Reduce arrays of at most one chunk in scratch memory, and copy the result to ``out``."""
        total = self._scratch_arrays(out.size)[0]
        self.accumulate(sources, total)
        self.finalize(total)
        self.narrow(total, out)

    def _scratch_arrays(self, size: int) -> tuple[Array, ...]:
        if not self._scratch:
            self._scratch = (
                np.empty(self.chunk_size, self.accumulate_dtype),
                np.empty(self.chunk_size, self.accumulate_dtype),
            )
        return tuple(array[:size] for array in self._scratch)


def _bfloat16_bits(value: Array) -> Array:
    """Round float32 values to bfloat16 (ties to even), and return the bits as uint16.

    A NaN becomes a quiet NaN.
    """
    bits = value.view(np.uint32)
    rounded = bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    result = (rounded >> np.uint32(16)).astype(np.uint16)
    is_nan = np.isnan(value)
    if is_nan.any():
        result[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return result
