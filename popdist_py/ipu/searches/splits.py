"""The search for the division of a model into stages that fit into memory and run fastest.

The module ``splits`` does not search for checkpoints or for the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import Final

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import ipu_fits, least_bytes, stash_depth
from popdist_py.ipu.searches.places import places_to_cut
from popdist_py.ipu.searches.run import Run
from popdist_py.ipu.stage_cycles import operation_cycles

__all__ = ["best_splits", "least_slowest"]

# The largest number of places (possible beginnings of stages) for which a search for the best
# stages tries all places at once. The time of a search for the best stages grows with the square of
# the number of places (possible beginnings of stages).
_MANY_PLACES: Final = 64


def best_splits(
    run: Run, stages: int, places: Sequence[int] | None = None, *, tries_all: bool = True
) -> Placement | None:
    """Return the division of a model into stages that makes the slowest stage fastest.

    In the returned placement, every stage fits into the memory of its IPU. The function
    ``best_splits`` returns None if no division of the model into stages fits into memory. The
    search for the best division of the model uses dynamic programming. The memory that a stage
    needs depends only on the stage's number and on its first and last operation. A search that
    tries all places therefore finds a division of the model that fits into memory, if such a
    division exists.

    If stages can begin at many places, the search first tries only some of the places. A second
    search then tries all places (possible beginnings of stages) near the best places of the first
    search. If the search did not try all places, the slowest stage of the returned division may be
    slower than necessary by the time of one or two operations.

    Args:
        run: The configuration of the run (graph, placement, settings and IPU). The search does not
            use the placement (stages and IPUs) in ``run``.
        stages: The number of stages into which the model is divided. Each stage gets its own IPU.
        places: The numbers of the operations where a stage may begin. If ``places`` is None, a
            stage may begin at the places that ``places_to_cut`` returns, or at all operations if
            those places are too few.
        tries_all: Whether to try all places where a stage may begin, if a search with only some of
            the places does not find a division that fits into memory. The search with all places
            can take a minute.
    """
    count = len(run.graph.operations)
    inner: Sequence[int] = places_to_cut(run.graph)
    if places is not None:
        inner = sorted(set(places) - {0, count})
    elif len(inner) < stages - 1:
        inner = range(1, count)
    work, fits = _work_between(run, stages), _fitting(run, stages)

    def best(inner: Sequence[int]) -> tuple[int, ...] | None:
        ends = [0, *inner, count]
        # If the last stage does not fit into memory wherever the stage begins, no division of the
        # model fits.
        lasts = reversed(range(stages - 1, len(ends) - 1) if stages > 1 else range(1))
        if len(ends) <= stages or not any(fits(ends[first], count, stages - 1) for first in lasts):
            return None
        return least_slowest(ends, stages, work, fits)

    step = max(1, -(-len(inner) // max(_MANY_PLACES, 2 * stages)))
    cuts = best(inner[::step])
    if step > 1 and cuts is not None:
        near = {inner.index(cut) + i for cut in cuts[1:-1] for i in range(1 - step, step)}
        cuts = best([inner[i] for i in sorted(near) if 0 <= i < len(inner)])
    elif step > 1 and tries_all:
        cuts = best(inner)
    return None if cuts is None else _placement(cuts)


def least_slowest(
    ends: Sequence[int],
    stages: int,
    work: Callable[[int, int, int], float],
    fits: Callable[[int, int, int], bool],
) -> tuple[int, ...] | None:
    """Return the ends of stages that fit into memory and make the slowest stage fastest.

    The returned ends of stages are a selection from ``ends``. The function returns None instead of
    the ends of stages if the stages cannot fit into memory. The function first computes the best
    division of the model for unlimited memory. The best division of the model for unlimited memory
    decides which places the search tries first, and when the search ends.

    Args:
        ends: The numbers of the operations before which a stage may begin or end.
        stages: The number of stages into which the model is divided.
        work: A function that returns the computing time of a pipeline stage for one micro-batch.
            The arguments of the given function are the places where the stage begins and ends, and
            the number of the stage.
        fits: A function that tells whether a pipeline stage fits into the memory of its IPU. The
            arguments of the given function are the places where the stage begins and ends, and the
            number of the stage.
    """
    ideal = _ideal(ends, stages, work)

    def options(stage: int, last: int) -> list[tuple[float, int]]:
        """Return each possible beginning of a stage, with the least time of the slowest stage.

        The least time of the slowest stage is computed for unlimited memory, for the stage
        ``stage`` and all earlier stages.
        """
        if not stage:
            return [(ideal[0][last], 0)]
        before = ideal[stage - 1]
        firsts = range(stage, last)
        return sorted((max(before[f], work(ends[f], ends[last], stage)), f) for f in firsts)

    @cache
    def best(stage: int, last: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the best division of the operations before ``ends[last]`` into stages.

        The stages of the returned division have the numbers from 0 to ``stage``.

        The returned division contains the time of the slowest stage, and the place (index of an
        operation) where each stage ends.
        """
        found = None
        for least, first in options(stage, last):
            if found is not None and least >= found[0]:
                break
            before = best(stage - 1, first) if stage else (least, (0,))
            if before is not None and fits(ends[first], ends[last], stage):
                slowest = max(least, before[0])
                if found is None or slowest < found[0]:
                    found = slowest, (*before[1], ends[last])
        return found

    found = best(stages - 1, len(ends) - 1)
    return None if found is None else found[1]


def _ideal(
    ends: Sequence[int], stages: int, work: Callable[[int, int, int], float]
) -> list[list[float]]:
    """Return the least possible time of the slowest stage, for unlimited memory.

    For each stage, the returned list contains a list of the times that the slowest stage up to this
    stage needs. A list of times contains one time for each place where its stage can end.
    """
    table = [[work(0, end, 0) for end in ends]]
    for stage in range(1, stages):
        before = table[-1]
        row = []
        for last, end in enumerate(ends):
            firsts = range(stage, last)
            options = (max(before[f], work(ends[f], end, stage)) for f in firsts)
            row.append(min(options, default=inf))
        table.append(row)
    return table


def _placement(cuts: Sequence[int]) -> Placement:
    """Return a ``Placement`` with one stage between neighbouring ``cuts``, each on its own IPU."""
    stages = [s for s in range(len(cuts) - 1) for _ in range(cuts[s + 1] - cuts[s])]
    return Placement(tuple(stages), tuple(range(len(cuts) - 1)))


def _work_between(run: Run, stages: int) -> Callable[[int, int, int], float]:
    """Return a function that computes the clock cycles of a stage for one micro-batch.

    The arguments of the returned function are the number of the stage's first operation, the number
    of the operation after the stage, and the stage's number. The computed clock cycles do not
    depend on recomputation checkpoints.
    """
    whole = Placement((0,) * len(run.graph.operations), (0,))
    forward, backward = operation_cycles(run.graph, whole, run.settings, run.ipu, run.model)
    sums = [0.0, *accumulate(forward)], [0.0, *accumulate(backward)]
    again = run.settings.recomputing(Placement(tuple(range(stages)), tuple(range(stages))))

    def work(begin: int, end: int, stage: int) -> float:
        times = 2 if stage in again else 1
        return times * (sums[0][end] - sums[0][begin]) + sums[1][end] - sums[1][begin]

    return work


def _fitting(run: Run, stages: int) -> Callable[[int, int, int], bool]:
    """Return a function that tells whether a stage fits into the memory of its IPU.

    The arguments of the returned function are the number of the stage's first operation, the number
    of the operation after the stage, and the stage's number. The returned function uses two facts
    to estimate the memory of fewer stages. A pipeline stage does not fit into memory if its
    variables alone are too large. A stage that fits into memory also fits with a smaller stash of
    activations.
    """
    sums = [0, *accumulate(least_bytes(run.graph, run.settings))]
    room = (run.ipu.tiles - run.settings.io_tiles) * run.ipu.tile_bytes
    one_each = Placement(tuple(range(stages)), tuple(range(stages)))
    again = run.settings.recomputing(one_each)
    depths = [stash_depth(stage, stages, run.settings) for stage in range(stages)]
    # The known results of ``fits``, so that no memory estimate is repeated. For each stage, the
    # dictionary contains the largest stash depth with which the stage fits into memory, and the
    # smallest stash depth with which the stage does not fit. The stash depth is the number of
    # micro-batches whose activations a pipeline stage keeps.
    known: dict[tuple[int, int, bool, bool, float], tuple[int, int]] = {}

    def fits(begin: int, end: int, stage: int) -> bool:
        if sums[end] - sums[begin] > room:
            return False
        depth = depths[stage]
        key = begin, end, depth > 0, stage in again, run.settings.proportion(stage)
        fitting, failing = known.get(key, (-1, max(depths) + 1))
        if fitting < depth < failing:
            if _stage_fits(run, begin, end, stage, stages):
                fitting = depth
            else:
                failing = depth
            known[key] = fitting, failing
        return depth <= fitting

    return fits


def _stage_fits(run: Run, begin: int, end: int, stage: int, stages: int) -> bool:
    """Return whether a stage with the operations from ``begin`` to ``end`` fits into memory.

    Whether the stage fits into memory does not depend on the places where the other stages begin
    and end.
    """
    before = [*range(stage), begin] if stage else [0]
    count, after = len(run.graph.operations), stages - stage - 1
    rest = [*range(count - after + 1, count + 1)] if after else []
    placement = _placement([*before, end, *rest])
    return ipu_fits(run.graph, placement, run.settings, run.ipu, stage, run.estimates)
