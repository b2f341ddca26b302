"""Sums of gradients that travel between hosts in 16 bits: fp16 or bf16, with error feedback.

What rounding a sum loses is added to the sum of the next step (Seide et al. 2014; with a second
rounding where several hosts' sums are added up by one of them: Tang et al. 2019). NumPy computes,
torch converts: NumPy's own conversion of halves takes fifty times as long.

Nothing here communicates: it yields the rounds that a communicator exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array
from popdist_py.collectives.compression_rounds import Round, segments
from popdist_py.poptorch.update.error_feedback import ErrorFeedback

__all__ = ["FORMATS", "RoundedSums", "own_slice", "pieces"]

FORMATS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Elements of one piece: as an exact reduction sends.
_PIECE: Final = 2 * CHUNK_BYTES // 4
# An encoded segment begins with its exponent.
_HEADER_BYTES: Final = 4
# Values are scaled by a power of two, so that the largest is just below 2 ** 15: half ends at
# 65504. The scale and its inverse are normal numbers of float32.
_TOP, _LARGEST_EXPONENT = 15, 126
# With scales from here on, a value that is rounded up may overflow when it is scaled back.
_MAY_OVERFLOW = 128 - _TOP


def own_slice(size: int, owner: int, num_owners: int) -> slice:
    """Return which of ``size`` elements one owner reduces."""
    return slice(size * owner // num_owners, size * (owner + 1) // num_owners)


def pieces(whole: slice) -> list[slice]:
    """Cut a slice into pieces that are large enough for few calls, and fit the cache."""
    return [
        slice(start, min(start + _PIECE, whole.stop))
        for start in range(whole.start, whole.stop, _PIECE)
    ]


class RoundedSums:
    """One array whose sums travel in a format of 16 bits; a ``Compression``.

    Args:
        name: ``fp16`` or ``bf16``.
        size: number of elements of the array.
        feedback: of the array.
    """

    def __init__(self, name: str, size: int, feedback: ErrorFeedback) -> None:
        self.name = name
        self._format = FORMATS[name]
        self._size = size
        self._feedback = feedback
        # New memory costs a page fault for every 4 KiB, as much as converting what they hold.
        self._decoded = np.empty(min(size, _PIECE), np.float32)
        self._free: dict[int, list[Array]] = {}

    def parts(self, owner: int, num_owners: int) -> list[slice]:
        """Return the pieces of one owner's slice."""
        return pieces(own_slice(self._size, owner, num_owners))

    def rounds(self, part: slice, total: Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield the one round that sums ``total``: values there, and with many hosts sums back."""
        cut = segments(total, num_hosts)
        own = cut[min(rank, len(cut) - 1)]
        with_left = segments(self._feedback.values(part), num_hosts)
        encoded = [self._encode(values, left) for values, left in zip(cut, with_left, strict=True)]
        sums: list[Array] = []

        def combine(values: Sequence[Array]) -> None:
            self._add_others(values, rank, own)
            if sums:
                left = segments(self._feedback.sums(part), num_hosts)[rank]
                self._encode(own, left, sums[rank])

        if num_hosts == 2:
            yield Round(encoded * 2, combine)
        else:
            sums += [self._room(one.nbytes) for one in encoded]
            yield Round(encoded, combine, sums)
            # Its own has the values that travelled already.
            for segment, one in zip(cut, sums, strict=True):
                if segment is not own:
                    self._decode(one, segment)
        for room in (*encoded, *sums):
            self._free[room.nbytes].append(room)

    def _room(self, num_bytes: int) -> Array:
        free = self._free.setdefault(num_bytes, [])
        return free.pop() if free else np.empty(num_bytes, np.uint8)

    @np.errstate(invalid="ignore", over="ignore")
    def _encode(self, values: Array, left: Array, out: Array | None = None) -> Array:
        """Return as bytes ``values`` and what was left of the step before; keep what is left now.

        ``values`` become those that the bytes stand for. Infinite ones and NaN travel as they are,
        and leave nothing.
        """
        encoded = self._room(_HEADER_BYTES + 2 * values.size) if out is None else out
        np.add(values, left, out=left)
        exponent, is_finite = _exponent(left) if self._format == torch.float16 else (0, False)
        encoded[:_HEADER_BYTES].view(np.int32)[0] = exponent
        if exponent:
            np.multiply(left, np.float32(2.0**-exponent), out=values)
        halves = self._halves(encoded)
        halves.copy_(torch.from_numpy(values if exponent else left))
        self._decode(encoded, values)
        np.subtract(left, values, out=left)
        is_finite = is_finite and exponent < _MAY_OVERFLOW
        if not is_finite and not math.isfinite(left.sum()):
            # Finite values that were rounded to infinite ones: these less themselves are NaN. The
            # next value towards zero is finite.
            rounded_up = np.isinf(left)
            if rounded_up.any():
                encoded[_HEADER_BYTES:].view(np.int16)[rounded_up] -= 1
                self._decode(encoded, values)
            left[~np.isfinite(left)] = 0
        return encoded

    def _halves(self, encoded: Array) -> torch.Tensor:
        return torch.from_numpy(encoded[_HEADER_BYTES:].view(np.int16)).view(self._format)

    @np.errstate(invalid="ignore", over="ignore")
    def _decode(self, encoded: Array, out: Array) -> None:
        exponent = int(encoded[:_HEADER_BYTES].view(np.int32)[0])
        torch.from_numpy(out).copy_(self._halves(encoded))
        if exponent:
            np.multiply(out, np.float32(2.0**exponent), out=out)

    @np.errstate(invalid="ignore", over="ignore")
    def _add_others(self, values: Sequence[Array], rank: int, own: Array) -> None:
        """Add to ``own`` what the others sent: with two hosts the same sum on both."""
        other = self._decoded[: own.size]
        for sender, value in enumerate(values):
            if sender != rank:
                self._decode(value, other)
                # In the order of the hosts: of two NaN the first one passes on.
                first, second = (other, own) if sender < rank else (own, other)
                np.add(first, second, out=own)

    def state(self) -> dict[str, Any]:
        """Return nothing: error feedback is all that stays from step to step."""
        return {}

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""


def _exponent(values: Array) -> tuple[int, bool]:
    """Return the power of two by which halves have to be multiplied to hold ``values``.

    Returns:
        The exponent, and whether all values are finite.
    """
    if not values.size:
        return 0, True
    largest = max(float(values.max()), -float(values.min()))
    is_finite = math.isfinite(largest)
    if not is_finite:
        finite = values[np.isfinite(values)]
        largest = float(np.abs(finite).max()) if finite.size else 0.0
    exponent = max(math.frexp(largest)[1] - _TOP, -_LARGEST_EXPONENT) if largest else 0
    return exponent, is_finite
