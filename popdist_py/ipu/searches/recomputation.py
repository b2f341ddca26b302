"""The search for the kind of recomputation with which a model fits into memory and runs fastest.

The module ``recomputation`` estimates the memory and the time of a run with each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from popdist_py.ipu.searches.places import places_to_cut, with_checkpoints
from popdist_py.ipu.searches.run import Run

__all__ = ["cheapest_recomputation"]


def cheapest_recomputation(run: Run) -> Run | None:
    """Return the configuration with the fastest kind of recomputation that fits into memory.

    The function returns None if the model does not fit into memory with any kind of recomputation
    of activations.
    """
    fitting = [other for other in _recomputations(run) if other.fits]
    return min(fitting, key=lambda other: other.cycles, default=None)


def _recomputations(run: Run) -> Iterator[Run]:
    """Yield the run with each kind of recomputation, then with ever fewer checkpoints."""
    for recompute in ("none", "norm", "standard", "stage"):
        yield replace(run, settings=replace(run.settings, recompute=recompute))
    places = places_to_cut(run.graph)
    settings = replace(run.settings, recompute="stage")
    every = 1
    while places and every <= len(places):
        graph = with_checkpoints(run.graph, places[every - 1 :: every])
        yield replace(run, graph=graph, settings=settings)
        every *= 2
