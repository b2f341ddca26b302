"""PowerSGD: gradients of matrices travel between hosts as two thin factors (Vogels et al. 2019).

A matrix M [n, m] goes as P = M Q [n, r], made orthonormal, and Q = M^T P [m, r]; every host
rebuilds P Q^T. What that leaves out is added to the next step's M, and the next step starts from
this Q. As in torch's ``powerSGD_hook``, the first steps, and parameters that would not shrink,
travel exactly.

Nothing here communicates: it yields the rounds that a communicator exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array
from popdist_py.collectives.compression_rounds import Round, exact_round, reduce_in_order
from popdist_py.poptorch.update.error_feedback import ErrorFeedback
from popdist_py.poptorch.update.rounded_sums import own_slice, pieces

__all__ = ["PowerSgd", "PowerSgdSettings"]

# A matrix is compressed if its factors are at most this part of it: torch's min_compression_rate.
_SMALLEST_RATE: Final = 2
_NOTHING: Final = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class PowerSgdSettings:
    """What a program may choose.

    Attributes:
        rank: columns r of the factors.
        start_step: number of steps that travel exactly before.
        warm_start: whether Q starts from that of the step before, not from random numbers.
    """

    rank: int
    start_step: int
    warm_start: bool

    def __str__(self) -> str:
        start = "warm" if self.warm_start else "random"
        return f"powersgd rank {self.rank} from step {self.start_step}, {start} start"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter whose gradient is compressed.

    Attributes:
        index: among the matrices of the array, equal on all hosts.
        rows: n.
        columns: m.
    """

    index: int
    rows: int
    columns: int


class PowerSgd:
    """One array of gradients whose matrices travel as factors; a ``Compression``.

    Args:
        settings: of all arrays alike.
        shapes: of the parameters, in the order of the array.
        feedback: of the array.
    """

    def __init__(
        self,
        settings: PowerSgdSettings,
        shapes: Sequence[Sequence[int]],
        feedback: ErrorFeedback,
    ) -> None:
        self.name = str(settings)
        self._settings = settings
        self._feedback = feedback
        self._matrices, self._others, self._size = _cut(shapes, settings.rank)
        self._factors: dict[int, Array] = {}  # the last Q, by index of the matrix
        self._steps = 0

    def parts(self, owner: int, num_owners: int) -> list[slice]:
        """Return one owner's pieces, or from ``start_step`` on its matrices and pieces of the rest.

        Called once in a step.
        """
        self._steps += 1
        if self._steps <= self._settings.start_step:
            return pieces(own_slice(self._size, owner, num_owners))
        rest = [piece for other in self._others for piece in pieces(other)]
        wholes = [slice(*bounds) for bounds in self._matrices]
        # The largest first, each to whom has least: equal on all hosts.
        loads, own = [0] * num_owners, []
        for part in sorted([*wholes, *rest], key=lambda s: (s.start - s.stop, s.start)):
            least = loads.index(min(loads))
            loads[least] += part.stop - part.start
            if least == owner:
                own.append(part)
        self._forget_factors_of_others(own)
        return own

    def _forget_factors_of_others(self, own: Sequence[slice]) -> None:
        """Drop factors that were loaded of matrices whose owners go on with newer ones."""
        bounds = {(part.start, part.stop) for part in own}
        owned = {matrix.index for key, matrix in self._matrices.items() if key in bounds}
        self._factors = {index: q for index, q in self._factors.items() if index in owned}

    def rounds(self, part: slice, total: Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield two rounds for a matrix, for P and Q, and one for anything else."""
        found = self._matrices.get((part.start, part.stop))
        if found is None or self._steps <= self._settings.start_step:
            yield exact_round(total, np.add, rank, num_hosts)
            return
        # One host adds up, and all have its result: so they need not compute alike to the bit.
        holder = found.index % num_hosts
        matrix = total.reshape(found.rows, found.columns)
        left = self._feedback.values(part).reshape(matrix.shape)
        first = _first_factor(matrix, left, self._start(found))
        yield _sum_at(holder, first, rank, num_hosts, orthonormal=True)
        own, second = _second_factor(matrix, first)
        yield _sum_at(holder, second, rank, num_hosts, orthonormal=False)
        is_finite = _rebuild(matrix, left, first, own, second)
        # An infinite value or NaN passes on, in all of the matrix; the next step starts anew.
        if is_finite:
            self._factors[found.index] = second
        else:
            self._factors.pop(found.index, None)
            left[:] = 0

    def _start(self, matrix: _Matrix) -> Array:
        """Return the Q [m, r] that this step starts from, equal on all hosts."""
        known = self._factors.get(matrix.index) if self._settings.warm_start else None
        # A column of zeros, as a gradient of zeros leaves it, would find nothing ever after.
        if known is not None and known.any(axis=0).all():
            return known
        seed = (self._steps, matrix.index)
        shape = matrix.columns, self._settings.rank
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def state(self) -> dict[str, Any]:
        """Return the steps done, and the factors to start from of the matrices that it owns.

        Before the first step since loading, of all that were loaded.
        """
        factors = {index: torch.from_numpy(q.copy()) for index, q in self._factors.items()}
        return {"steps": self._steps, "factors": factors}

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take what :meth:`state` returned on all instances: each had the factors of its own."""
        self._steps = max(state["steps"] for state in states)
        self._factors = {
            index: factor.numpy().copy()
            for state in states
            # An instance that owns nothing counts no steps: its factors are what it once loaded.
            if state["steps"] == self._steps
            for index, factor in state["factors"].items()
        }


def _cut(
    shapes: Sequence[Sequence[int]], rank: int
) -> tuple[dict[tuple[int, int], _Matrix], list[slice], int]:
    """Return the matrices by their bounds in the array, what lies between them, and its size."""
    matrices: dict[tuple[int, int], _Matrix] = {}
    others: list[slice] = []
    start = since = 0
    for shape in shapes:
        size = int(np.prod(shape, dtype=np.int64))
        rows = int(shape[0]) if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        if size and (rows + columns) * rank * _SMALLEST_RATE <= size:
            if since < start:
                others.append(slice(since, start))
            matrices[start, start + size] = _Matrix(len(matrices), rows, columns)
            since = start + size
        start += size
    if since < start:
        others.append(slice(since, start))
    return matrices, others, start


@np.errstate(invalid="ignore", over="ignore")
def _first_factor(matrix: Array, left: Array, start: Array) -> Array:
    """Add to the gradient what was left of it, in place; return P before it is summed."""
    first = np.empty((len(matrix), start.shape[1]), np.float32)
    for block in _blocks(matrix):
        np.add(matrix[block], left[block], out=matrix[block])
        np.matmul(matrix[block], start, out=first[block])
    return first


@np.errstate(invalid="ignore", over="ignore")
def _second_factor(matrix: Array, first: Array) -> tuple[Array, Array]:
    """Return this host's Q, and a copy that receives the sum over the hosts."""
    own = np.ascontiguousarray(matrix.T @ first)
    return own, own.copy()


@np.errstate(invalid="ignore", over="ignore")
def _rebuild(matrix: Array, left: Array, first: Array, own: Array, second: Array) -> bool:
    """Write P Q^T into ``matrix``, and what this host's part in it leaves out into ``left``.

    Returns:
        Whether the result is finite.
    """
    own_columns, columns = own.T.copy(), second.T.copy()
    blocks = _blocks(matrix)
    scratch = np.empty_like(matrix[blocks[0]])
    for block in blocks:
        part, thin = matrix[block], first[block]
        product = scratch[: len(part)]
        np.subtract(part, np.matmul(thin, own_columns, out=product), out=left[block])
        # Products and sums one by one have the same bits on any processor; a matrix product has
        # not.
        np.multiply(thin[:, :1], columns[0], out=part)
        for k in range(1, thin.shape[1]):
            np.multiply(thin[:, k : k + 1], columns[k], out=product)
            np.add(part, product, out=part)
    return bool(np.isfinite(first).all() and np.isfinite(second).all())


def _blocks(matrix: Array) -> list[slice]:
    """Return rows that fit the cache, block by block."""
    rows = max(1, CHUNK_BYTES // 4 // matrix.shape[1])
    return [slice(start, start + rows) for start in range(0, len(matrix), rows)]


def _sum_at(holder: int, factor: Array, rank: int, num_hosts: int, *, orthonormal: bool) -> Round:
    """Return the round in which one host adds up ``factor``, in place, and all get its result."""
    flat = factor.reshape(-1)

    @np.errstate(invalid="ignore", over="ignore")
    def combine(values: Sequence[Array]) -> None:
        if rank != holder:
            return
        reduce_in_order(values, np.add, flat)
        if orthonormal:
            factor[:] = _orthonormal(factor)

    only_there = [flat if host == holder else _NOTHING for host in range(num_hosts)]
    return Round(only_there, combine, only_there)


def _orthonormal(factor: Array) -> Array:
    """Return columns that are orthonormal and span those of ``factor``, whatever its rank."""
    if not np.isfinite(factor).all():
        return np.full_like(factor, np.nan)
    return np.linalg.qr(factor.astype(np.float64))[0].astype(np.float32)
