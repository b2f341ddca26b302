"""Rounds: what the owners of one slice send one another, when they do not send plain arrays.

The values that a compression and a transport exchange, and the round that reduces an array as it
is. Nothing here sends.
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

# Up to this size every rank sends its whole array to every other: sending results round would cost
# more time than the bytes that segments save.
_MAX_UNSEGMENTED_BYTES: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class Round:
    """Every rank sends to every other, combines what it got, and sends the result round.

    Attributes:
        outgoing: the flat array for each rank, its own included; all ranks send one rank arrays of
            one size and dtype. Nobody may touch them before the round is done.
        combine: called once with what all ranks sent to this one, in their order; it writes this
            rank's result, and may write nowhere else but to memory that is not sent.
        results: where the result of each rank goes, its own included; none if results stay where
            they are made.
    """

    outgoing: Sequence[_Array]
    combine: Callable[[Sequence[_Array]], None]
    results: Sequence[_Array] = ()


def segments(array: _Array, size: int) -> list[_Array]:
    """Cut an array into what each rank reduces: two ranks send one another everything."""
    if size == 2:
        return [array]
    bounds = [array.size * rank // size for rank in range(size + 1)]
    return [array[start:end] for start, end in pairwise(bounds)]


def exact_round(array: _Array, function: np.ufunc, rank: int, size: int) -> Round:
    """Return the round that reduces a flat array in place, in order of rank."""
    is_whole = size == 2 or array.nbytes * (size - 2) <= _MAX_UNSEGMENTED_BYTES
    outgoing = [array] * size if is_whole else segments(array, size)
    own = outgoing[rank]

    def combine(values: Sequence[_Array]) -> None:
        reduce_in_order(values, function, own)

    return Round(outgoing, combine, () if is_whole else outgoing)


def reduce_in_order(values: Sequence[_Array], function: np.ufunc, out: _Array) -> None:
    """Reduce what a round brought in order of rank into ``out``, which may be one of the values.

    The values from other ranks may be overwritten.
    """
    # Only the first two may be overwritten by the running total: the others are read later.
    total = out if out is values[0] or out is values[1] else values[0]
    function(values[0], values[1], out=total)
    for value in values[2:]:
        function(total, value, out=total)
    if total is not out:
        out[...] = total


class Compression(Protocol):
    """How the hosts' sums of one array travel; it keeps what a reduction leaves out for the next.

    All hosts make the same calls, so that they start the same rounds.
    """

    @property
    def name(self) -> str:
        """What the instances compare: equal for those that understand one another."""

    def parts(self, owner: int, num_owners: int) -> Sequence[slice]:
        """Return the parts of the array that one owner of each host reduces, in order.

        Those of all owners cover the array.
        """

    def rounds(self, part: slice, total: _Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield the rounds that reduce one part; when they are done, all hosts have equal bits.

        Args:
            part: which part.
            total: this host's sum, float32, flat; the sum over all hosts when the iterator ends.
            rank: of this host.
            num_hosts: number of hosts, at least 2.
        """
