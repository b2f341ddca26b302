"""The search for the recomputation with which a model fits into memory and runs fastest.

The module ``recomputation`` selects from the runs of the module ``checkpoint_sets``.
"""

from __future__ import annotations

from popdist_py.ipu.searches.checkpoint_sets import RecomputationPoint, recomputation_curve
from popdist_py.ipu.searches.run import LIMITS, Run

__all__ = ["cheapest_recomputation", "fastest_that_fits"]


def cheapest_recomputation(run: Run) -> Run | None:
    """Return the configuration with the fastest recomputation that fits into memory.

    If no configuration has the verdict "fits", the function returns the fastest one with the
    verdict "close". The function returns None if the model needs too much memory with any kind of
    recomputation and any set of checkpoints that the search compares.
    """
    found = fastest_that_fits(recomputation_curve(run))
    return None if found is None else found.run


def fastest_that_fits(curve: tuple[RecomputationPoint, ...]) -> RecomputationPoint | None:
    """Return the fastest point of a curve that fits, or else the fastest that is close to it."""
    fitting = (point for limit in LIMITS for point in curve if point.share <= limit)
    return next(fitting, None)
