"""Gradient sums that hosts send to each other in fp16 or bf16, with error feedback.

The rounding error of a gradient sum is added to the gradient sum of the next training step (Seide
et al. 2014). With more than two hosts, each host adds up one segment of the array of gradients. The
host that adds up a segment then rounds the sum of the segment a second time (Tang et al. 2019). The
module ``rounded_sums`` adds gradients with NumPy. Gradients are converted between number formats
with torch, because NumPy's conversion of float16 takes fifty times as long.

The module ``rounded_sums`` does not send data itself, but yields ``Round`` objects, which a
communicator executes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array
from popdist_py.collectives.compression_rounds import Round, segments
from popdist_py.poptorch.update.compressed.error_feedback import ErrorFeedback

__all__ = ["FORMATS", "RoundedSums", "own_slice", "pieces"]

FORMATS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The number of elements in one piece of a gradient array. The size of a piece is the same as in the
# reduction of gradients without compression.
_PIECE: Final = 2 * CHUNK_BYTES // 4
# An encoded segment of a gradient array begins with a 32-bit integer, the exponent of the power of
# two by which the segment was scaled.
_HEADER_BYTES: Final = 4
# Before rounding to float16, gradients are scaled by a power of two, so that the largest magnitude
# is just below 2 ** 15. The largest float16 value is 65504. The magnitude of the exponent is at
# most _LARGEST_EXPONENT, so that both the power of two and its inverse are normal float32 numbers.
_TOP, _LARGEST_EXPONENT = 15, 126
# If the exponent of the scaling power of two is at least _MAY_OVERFLOW, a gradient that was rounded
# up may overflow float32 when the scaling is undone.
_MAY_OVERFLOW = 128 - _TOP


def own_slice(size: int, owner: int, num_owners: int) -> slice:
    """Return the slice of an array of ``size`` elements that one instance of a host reduces."""
    return slice(size * owner // num_owners, size * (owner + 1) // num_owners)


def pieces(whole: slice) -> list[slice]:
    """Divide a slice of an array into pieces of about equal size.

    A piece fits into the CPU cache, and is large enough to keep the number of calls small.
    """
    return [
        slice(start, min(start + _PIECE, whole.stop))
        for start in range(whole.start, whole.stop, _PIECE)
    ]


class RoundedSums:
    """The ``Compression`` (an interface of the collectives) of a gradient array to a 16-bit format.

    Args:
        name: The name of the 16-bit format, ``fp16`` or ``bf16``.
        size: The number of elements of the array.
        feedback: The store for the rounding errors of the array.
    """

    def __init__(self, name: str, size: int, feedback: ErrorFeedback) -> None:
        self.name = name
        self._format = FORMATS[name]
        self._size = size
        self._feedback = feedback
        # Buffers for encoded gradients are kept for later training steps, because new memory causes
        # one page fault for every 4 KiB. A page fault takes as long as the conversion of 4 KiB of
        # numbers.
        self._decoded = np.empty(min(size, _PIECE), np.float32)
        self._free: dict[int, list[Array]] = {}

    def parts(self, owner: int, num_owners: int) -> list[slice]:
        """Return the pieces of the gradient array's slice that one instance of a host reduces."""
        return pieces(own_slice(self._size, owner, num_owners))

    def rounds(self, part: slice, total: Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield the only exchange between hosts that is needed to sum ``total`` over the hosts.

        Each host sends its gradients to the other hosts, rounded to 16 bits. With more than two
        hosts, each host sums one segment of the gradient array, and also sends the rounded sum of
        this segment to the other hosts.
        """
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
            # The segment that this host has summed is skipped, because the segment already contains
            # the rounded sum.
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
        """Encode ``values`` plus the rounding errors ``left`` in 16 bits, and return the bytes.

        Infinite and NaN gradients remain infinite and NaN, and their rounding error counts as 0.

        Args:
            values: The gradients to encode, which are overwritten with the rounded gradients.
            left: The rounding errors of the last training step, which are overwritten with the
                rounding errors of this step.
            out: The buffer for the encoded bytes; None to use a buffer of the RoundedSums object.
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
            # The rounding error of a gradient is infinite if a finite gradient was rounded to
            # infinity. The rounding error is NaN if the gradient was already infinite or NaN. If a
            # finite number wrongly became infinite, subtracting 1 from the bits of the encoded
            # number gives the next number towards zero, which is finite.
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
        """Add the other hosts' gradients to the segment ``own`` of this host.

        If there are two hosts, both hosts compute bit-identical sums.
        """
        other = self._decoded[: own.size]
        for sender, value in enumerate(values):
            if sender != rank:
                self._decode(value, other)
                # The gradients are added in the order of the hosts. The order of the hosts affects
                # the sum, because the sum of two NaNs has the bits of the first NaN.
                first, second = (other, own) if sender < rank else (own, other)
                np.add(first, second, out=own)

    def state(self) -> dict[str, Any]:
        """Return an empty dict, because the ``ErrorFeedback`` object saves the rounding errors.

        A RoundedSums object has no other state that is needed after a training step.
        """
        return {}

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing, because the ``ErrorFeedback`` object loads the rounding errors."""


def _exponent(values: Array) -> tuple[int, bool]:
    """Return the exponent of the power of two that scales ``values`` into the range of float16.

    To undo the scaling, float16 numbers are multiplied by 2 ** exponent.

    Returns:
        The exponent, and whether all numbers in ``values`` are finite.
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
