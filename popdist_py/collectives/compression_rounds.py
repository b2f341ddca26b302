"""Rounds: exchanges of arrays between hosts, with or without compression.

Each slice of an array has one owner on every host, an instance that exchanges the slice with the
owners on the other hosts. A ``Compression`` describes each exchange as a ``Round``, and a ``Mesh``
carries it out. ``exact_round`` makes the round of an all-reduce without compression. This module
does not send data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    _Array: TypeAlias = np.ndarray[Any, Any]

__all__ = ["Compression", "Round", "exact_round", "reduce_in_order", "segments"]

# Every rank sends its whole array to every other rank if (ranks - 2) * bytes is at most this
# number. Larger arrays are divided into segments. Segments reduce the number of bytes sent, but the
# results need a second exchange.
_MAX_UNSEGMENTED_BYTES: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of arrays between all ranks, and the reduction of the received arrays.

    Attributes:
        outgoing: The flat array to send to each rank. The array for this rank is not sent. All
            arrays sent to one rank have the same size and dtype. The caller must not change these
            arrays before the round is done.
        combine: A function that reduces the arrays sent to this rank. ``combine`` is called once,
            with one array from each rank, in order of rank. ``combine`` writes this rank's result.
            ``combine`` must not write to the arrays for other ranks in ``outgoing`` or ``results``.
        results: For each rank, including this one, the array that receives the rank's result.
            ``results`` is empty if the ranks do not send their results.
    """

    outgoing: Sequence[_Array]
    combine: Callable[[Sequence[_Array]], None]
    results: Sequence[_Array] = ()


def segments(array: _Array, size: int) -> list[_Array]:
    """Divide ``array`` into one segment for each rank; with two ranks, return the whole array."""
    if size == 2:
        return [array]
    bounds = [array.size * rank // size for rank in range(size + 1)]
    return [array[start:end] for start, end in pairwise(bounds)]


def exact_round(array: _Array, function: np.ufunc, rank: int, size: int) -> Round:
    """Return the round that reduces a flat array in place without compression.

    The arrays of the ranks are combined in order of rank.
    """
    is_whole = size == 2 or array.nbytes * (size - 2) <= _MAX_UNSEGMENTED_BYTES
    outgoing = [array] * size if is_whole else segments(array, size)
    own = outgoing[rank]

    def combine(values: Sequence[_Array]) -> None:
        reduce_in_order(values, function, own)

    return Round(outgoing, combine, () if is_whole else outgoing)


def reduce_in_order(values: Sequence[_Array], function: np.ufunc, out: _Array) -> None:
    """Reduce ``values`` in order of rank into ``out``, which may be one of ``values``.

    The arrays in ``values`` that came from other ranks may be overwritten.
    """
    # The running total may overwrite only the first two values, because the others are read later.
    total = out if out is values[0] or out is values[1] else values[0]
    function(values[0], values[1], out=total)
    for value in values[2:]:
        function(total, value, out=total)
    if total is not out:
        out[...] = total


class Compression(Protocol):
    """The compression of one array that hosts exchange.

    A Compression object stores the compression error of one call and adds it to the data of the
    next call. All hosts make the same calls, so that they start the same rounds.
    """

    @property
    def name(self) -> str:
        """The name that the instances compare; equal names mean compatible compressions."""

    def parts(self, owner: int, num_owners: int) -> Sequence[slice]:
        """Return the parts of the array that ``owner`` reduces, in order.

        The parts of all owners together cover the array.

        Args:
            owner: Position of the owner among the instances of its host.
            num_owners: Number of owners on each host.
        """

    def rounds(self, part: slice, total: _Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield the rounds that reduce one part of the array.

        When the rounds are done, all hosts have bit-identical values.

        Args:
            part: The part of the array.
            total: The sum of this host's arrays, as a flat float32 array. When the iterator ends,
                ``total`` holds the sum over all hosts.
            rank: Rank of this host.
            num_hosts: Number of hosts, at least 2.
        """
