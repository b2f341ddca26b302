"""Plain mpi4py: The temperature of a plate by Jacobi's method, with its rows divided among ranks.

poprun-py -n 2 examples/mpi.py
mpirun -n 2 python examples/mpi.py
python examples/mpi.py

Every rank updates its rows, and exchanges its first and last row with its neighbours. The border is
fixed at u = x^2 - y^2. This function is the exact solution on the plate and on its grid, so the
program compares its result with this function.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
from common.arguments import Parser, positive, rate
from mpi4py import MPI


def exact(rows: range, size: int) -> np.ndarray:
    """Return u = x^2 - y^2 on the given rows of the grid, where x and y go from 0 to 1."""
    y = np.array(rows, dtype=float)[:, None] / (size - 1)
    x = np.arange(size) / (size - 1)
    return x**2 - y**2


def my_rows(size: int, ranks: int, rank: int) -> range:
    """Return the inner rows of the grid that a rank updates.

    The numbers of rows of two ranks differ by at most 1.
    """
    shortest, longer = divmod(size - 2, ranks)
    first = 1 + rank * shortest + min(rank, longer)
    return range(first, first + shortest + (rank < longer))


def solve(comm: MPI.Comm, size: int, tolerance: float) -> tuple[int, float]:
    """Iterate until no value changes by more than ``tolerance``.

    Returns:
        The number of iterations, and the largest error.
    """
    rows = my_rows(size, comm.size, comm.rank)
    held = range(rows.start - 1, rows.stop + 1)  # with one row of each neighbour or of the border
    solution = exact(held, size)
    u = solution.copy()
    u[1:-1, 1:-1] = 0
    above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    if above != MPI.PROC_NULL:
        u[0, 1:-1] = 0
    if below != MPI.PROC_NULL:
        u[-1, 1:-1] = 0
    iterations, change = 0, np.inf
    while change > tolerance:
        comm.Sendrecv(u[1], dest=above, recvbuf=u[-1], source=below)
        comm.Sendrecv(u[-2], dest=below, recvbuf=u[0], source=above)
        new = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
        iterations += 1
        # The check of the change waits for all ranks, which is slow. It is therefore made only in
        # every tenth iteration.
        if iterations % 10 == 0:
            change = comm.allreduce(float(np.abs(new - u[1:-1, 1:-1]).max()), MPI.MAX)
        u[1:-1, 1:-1] = new
    error = np.abs(u - solution)[1:-1].max()
    return iterations, comm.allreduce(float(error), MPI.MAX)


def main(argv: list[str] | None = None) -> None:
    """Solve the equation, and fail if the result differs from the exact solution."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: poprun-py -n 2 examples/mpi.py",
    )
    parser.add_argument(
        "--size", type=positive, default=66, help="points of the grid in x and in y"
    )
    parser.add_argument("--tolerance", type=rate, default=1e-9, help="of a value's last change")
    args = parser.parse_args(argv)
    comm = MPI.COMM_WORLD
    if args.size - 2 < comm.size:
        sys.exit(f"--size {args.size}: {comm.size} ranks need at least {comm.size + 2} points")

    began = time.perf_counter()
    iterations, error = solve(comm, args.size, args.tolerance)
    # Each iteration multiplies the error by cos(pi / (size - 1)). The size of the last change
    # therefore gives a bound of the remaining error.
    bound = args.tolerance / (1 - math.cos(math.pi / (args.size - 1)))
    if comm.rank == 0:
        print(
            f"{args.size} x {args.size} points on {comm.size} rank(s): {iterations} iterations in "
            f"{time.perf_counter() - began:.2f} s, largest error {error:.1e}"
        )
    if error > bound:
        sys.exit(f"the result is wrong: largest error {error:.1e}, expected at most {bound:.1e}")


if __name__ == "__main__":
    main()
