"""PowerSGD, which sends the gradient of a matrix as two thin matrices (Vogels et al. 2019).

For a gradient matrix M of the shape [n, m], the hosts sum the thin matrix P = M Q of shape [n, r]
(r is the rank), and make the columns of P orthonormal. The hosts then sum Q = M^T P of shape [m,
r]. Every host then computes the matrix product P Q^T of the two thin matrices, which is an
approximation of the sum of the gradient matrix M over the hosts. The error of the approximation P
Q^T is added to the gradient matrix M of the next training step. Each training step starts from the
thin matrix Q of the previous training step. As in torch's ``powerSGD_hook``, some gradients are
sent without compression. These are the gradients of the first training steps, and gradients whose
thin matrices P and Q would be too large.

The module ``power_sgd`` does not send data itself, but yields ``Round`` objects, which a
communicator executes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from popdist_py.collectives.arithmetic import CHUNK_BYTES, Array
from popdist_py.collectives.compression_rounds import Round, exact_round, reduce_in_order
from popdist_py.poptorch.update.compressed.error_feedback import ErrorFeedback
from popdist_py.poptorch.update.compressed.rounded_sums import own_slice, pieces

__all__ = ["PowerSgd", "PowerSgdSettings"]

# A gradient matrix is compressed if it has at least _SMALLEST_RATE times as many elements as the
# two thin matrices P and Q that replace it. In torch's powerSGD_hook, the name of _SMALLEST_RATE is
# min_compression_rate.
_SMALLEST_RATE: Final = 2
_NOTHING: Final = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class PowerSgdSettings:
    """The settings of PowerSGD that a program may choose.

    Attributes:
        rank: The number of columns of the thin matrices P and Q, whose product replaces a gradient
            matrix.
        start_step: The number of training steps without compression before the first compressed
            step.
        warm_start: Whether a training step starts from the thin matrix Q of the step before,
            instead of random numbers.
    """

    rank: int
    start_step: int
    warm_start: bool

    def __str__(self) -> str:
        start = "warm" if self.warm_start else "random"
        return f"powersgd rank {self.rank} from step {self.start_step}, {start} start"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The properties of a parameter whose gradient is compressed as a matrix.

    Attributes:
        index: The index of the matrix among all gradient matrices in the array of gradients, which
            is equal on all hosts.
        rows: The number of rows of the gradient matrix.
        columns: The number of columns of the matrix that contains a parameter's gradient.
    """

    index: int
    rows: int
    columns: int


class PowerSgd:
    """The ``Compression`` (an interface of the collectives) of one array of gradients by PowerSGD.

    Args:
        settings: The settings of PowerSGD, which are the same for all arrays.
        shapes: The shapes of the parameters, in the order of their gradients in the array.
        feedback: The store for the compression errors of the array.
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
        self._factors: dict[int, Array] = {}  # The last factor Q of each matrix, by matrix index.
        self._steps = 0

    def parts(self, owner: int, num_owners: int) -> list[slice]:
        """Return the parts of the gradient array that one instance of a host reduces.

        In the first ``start_step`` training steps, the parts of the array are pieces of one slice.
        In later training steps, the parts of the array are whole gradient matrices, and pieces of
        the array between the gradient matrices. The method ``parts`` counts the training steps, so
        ``parts`` must be called once in each training step.
        """
        self._steps += 1
        if self._steps <= self._settings.start_step:
            return pieces(own_slice(self._size, owner, num_owners))
        rest = [piece for other in self._others for piece in pieces(other)]
        wholes = [slice(*bounds) for bounds in self._matrices]
        # Each part of the gradient array is assigned to the instance ("owner") with the fewest
        # elements so far, beginning with the largest part. All hosts assign the parts of the
        # gradient array to instances in the same way.
        loads, own = [0] * num_owners, []
        for part in sorted([*wholes, *rest], key=lambda s: (s.start - s.stop, s.start)):
            least = loads.index(min(loads))
            loads[least] += part.stop - part.start
            if least == owner:
                own.append(part)
        self._forget_factors_of_others(own)
        return own

    def _forget_factors_of_others(self, own: Sequence[slice]) -> None:
        """Delete loaded matrices Q whose gradient matrices other instances of the host reduce.

        A loaded matrix Q whose gradient matrix another instance reduces would become outdated,
        because the other instance continues with a newer Q.
        """
        bounds = {(part.start, part.stop) for part in own}
        owned = {matrix.index for key, matrix in self._matrices.items() if key in bounds}
        self._factors = {index: q for index, q in self._factors.items() if index in owned}

    def rounds(self, part: slice, total: Array, rank: int, num_hosts: int) -> Iterator[Round]:
        """Yield the exchanges between hosts that reduce one part of the gradient array.

        A compressed gradient matrix needs one exchange between hosts for the thin matrix P and
        another exchange for Q. A part of the gradient array without compression needs only one
        exchange between hosts.
        """
        found = self._matrices.get((part.start, part.stop))
        if found is None or self._steps <= self._settings.start_step:
            yield exact_round(total, np.add, rank, num_hosts)
            return
        # One host computes the sums of the thin matrices P and Q and sends the sums to all hosts.
        # Therefore the sums are bit-identical on all hosts, even if the processors of the hosts
        # would compute different bits.
        holder = found.index % num_hosts
        matrix = total.reshape(found.rows, found.columns)
        left = self._feedback.values(part).reshape(matrix.shape)
        first = _first_factor(matrix, left, self._start(found))
        yield _sum_at(holder, first, rank, num_hosts, orthonormal=True)
        own, second = _second_factor(matrix, first)
        yield _sum_at(holder, second, rank, num_hosts, orthonormal=False)
        is_finite = _rebuild(matrix, left, first, own, second)
        # If a number in a gradient matrix is infinite or NaN, all numbers of the summed gradient
        # matrix become NaN. After a sum of NaN, the next training step starts from a random matrix
        # Q and without the compression errors of this step.
        if is_finite:
            self._factors[found.index] = second
        else:
            self._factors.pop(found.index, None)
            left[:] = 0

    def _start(self, matrix: _Matrix) -> Array:
        """Return the thin matrix Q [columns, rank] at the start of a step, equal on all hosts."""
        known = self._factors.get(matrix.index) if self._settings.warm_start else None
        # A gradient matrix of zeros makes columns of Q zero, and zero columns would remain zero in
        # all later training steps. Therefore random numbers replace a matrix Q that has a zero
        # column.
        if known is not None and known.any(axis=0).all():
            return known
        seed = (self._steps, matrix.index)
        shape = matrix.columns, self._settings.rank
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def state(self) -> dict[str, Any]:
        """Return the number of training steps, and this instance's last Q of each gradient matrix.

        Between the loading of a state and the next training step, the result contains all loaded
        matrices Q.
        """
        factors = {index: torch.from_numpy(q.copy()) for index, q in self._factors.items()}
        return {"steps": self._steps, "factors": factors}

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of all instances, which each contain the matrices Q of one instance."""
        self._steps = max(state["steps"] for state in states)
        self._factors = {
            index: factor.numpy().copy()
            for state in states
            # An instance that does not reduce any part of the gradient array does not count
            # training steps. The matrices Q of such an instance are skipped, because they are as
            # old as the last checkpoint that the instance loaded.
            if state["steps"] == self._steps
            for index, factor in state["factors"].items()
        }


def _cut(
    shapes: Sequence[Sequence[int]], rank: int
) -> tuple[dict[tuple[int, int], _Matrix], list[slice], int]:
    """Divide an array of gradients into matrices to compress, and the slices between the matrices.

    Returns:
        The gradient matrices, keyed by their bounds in the array; the slices of the array between
        the gradient matrices; and the size of the array.
    """
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
    """Add the last step's errors ``left`` to the gradient ``matrix``, and return this host's P."""
    first = np.empty((len(matrix), start.shape[1]), np.float32)
    for block in _blocks(matrix):
        np.add(matrix[block], left[block], out=matrix[block])
        np.matmul(matrix[block], start, out=first[block])
    return first


@np.errstate(invalid="ignore", over="ignore")
def _second_factor(matrix: Array, first: Array) -> tuple[Array, Array]:
    """Return this host's thin matrix Q, and a copy of Q for the sum over all hosts."""
    own = np.ascontiguousarray(matrix.T @ first)
    return own, own.copy()


@np.errstate(invalid="ignore", over="ignore")
def _rebuild(matrix: Array, left: Array, first: Array, own: Array, second: Array) -> bool:
    """Write the matrix product P Q^T into ``matrix``, and the compression error into ``left``.

    Args:
        matrix: The gradient matrix of this host plus the compression error of the last training
            step. The function ``_rebuild`` overwrites the gradient matrix with the matrix product P
            Q^T.
        left: The memory into which the compression error of the present training step is written.
        first: The thin matrix P.
        own: The thin matrix Q that this host has computed.
        second: The sum of the thin matrices Q over all hosts.

    Returns:
        Whether all numbers of the summed thin matrices P and Q are finite.
    """
    own_columns, columns = own.T.copy(), second.T.copy()
    blocks = _blocks(matrix)
    scratch = np.empty_like(matrix[blocks[0]])
    for block in blocks:
        part, thin = matrix[block], first[block]
        product = scratch[: len(part)]
        np.subtract(part, np.matmul(thin, own_columns, out=product), out=left[block])
        # The matrix product P Q^T is computed column by column, because element-wise
        # multiplications and additions give the same bits on all processors. The bits of a matrix
        # product may differ between types of processors.
        np.multiply(thin[:, :1], columns[0], out=part)
        for k in range(1, thin.shape[1]):
            np.multiply(thin[:, k : k + 1], columns[k], out=product)
            np.add(part, product, out=part)
    return bool(np.isfinite(first).all() and np.isfinite(second).all())


def _blocks(matrix: Array) -> list[slice]:
    """Divide the rows of a matrix into slices that fit into the CPU cache."""
    rows = max(1, CHUNK_BYTES // 4 // matrix.shape[1])
    return [slice(start, start + rows) for start in range(0, len(matrix), rows)]


def _sum_at(holder: int, factor: Array, rank: int, num_hosts: int, *, orthonormal: bool) -> Round:
    """Return the exchange between hosts that sums ``factor`` (P or Q) in place.

    Args:
        holder: The rank of the host that computes the sum and sends it to all hosts.
        factor: The thin matrix P or Q of this host, which the exchange overwrites with the sum.
        rank: The rank of this host.
        num_hosts: The number of hosts that sum their matrices P or Q.
        orthonormal: Whether the columns of the sum are made orthonormal.
    """
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
    """Return orthonormal columns whose linear combinations include the columns of ``factor``.

    The columns of ``factor`` may be linearly dependent. If a number in ``factor`` is not finite,
    all numbers of the result are NaN.
    """
    if not np.isfinite(factor).all():
        return np.full_like(factor, np.nan)
    return np.linalg.qr(factor.astype(np.float64))[0].astype(np.float32)
