"""The search for the largest micro-batch (number of samples) with which a model fits into memory.

The module ``batch`` estimates the memory of a run with other batches, and changes nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from popdist_py.ipu.searches.run import LIMITS, Run

__all__ = ["largest_batch"]


def largest_batch(run: Run, limit: int = 2**16) -> int:
    """Return the number of samples of the largest micro-batch that fits, up to ``limit``.

    If no micro-batch has the verdict "fits", the function returns the largest one with the verdict
    "close". The function returns 0 if a micro-batch of one sample needs too much memory.
    """
    found = (_largest(run, limit, most) for most in LIMITS)
    return next((batch for batch in found if batch), 0)


def _largest(run: Run, limit: int, most: float) -> int:
    """Return the largest micro-batch that needs at most a share of ``most`` of each tile."""

    def fits(batch: int) -> bool:
        return replace(run, graph=run.graph.with_batch(batch)).fullest.share <= most

    if not fits(1):
        return 0
    fitting = 1
    while 2 * fitting <= limit and fits(2 * fitting):
        fitting *= 2
    above = min(2 * fitting, limit + 1)
    while above - fitting > 1:
        middle = (fitting + above) // 2
        fitting, above = (middle, above) if fits(middle) else (fitting, middle)
    return fitting
