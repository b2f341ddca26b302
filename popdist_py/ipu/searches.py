"""Searches for the largest batch, the best splits and the cheapest recomputation that fit.

Every result is computed by applying the models of memory and time to changed runs. Questions that
the modules ``memory`` and ``cycles`` can answer without a search are not part of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from typing import Final

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import (
    ESTIMATES,
    Estimates,
    ipu_fits,
    least_bytes,
    memory,
    stash_depth,
)
from popdist_py.ipu.memory_contents import IpuMemory
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.stage_cycles import CYCLE_MODEL, CycleModel, operation_cycles

__all__ = [
    "Run",
    "best_splits",
    "cheapest_recomputation",
    "largest_batch",
    "least_slowest",
    "places_to_cut",
    "with_checkpoints",
]

# The time of a search grows with the square of the number of places. If there are more places than
# ``_MANY_PLACES``, a search does not try all places at first.
_MANY_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class Run:
    """All values that determine the memory and the cycles of a run."""

    graph: Graph
    placement: Placement
    settings: Settings
    ipu: IPU
    estimates: Estimates = ESTIMATES
    model: CycleModel = CYCLE_MODEL

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of every IPU."""
        return memory(self.graph, self.placement, self.settings, self.ipu, self.estimates).fits

    @property
    def fullest(self) -> IpuMemory:
        """The memory of the IPU with the fullest tile."""
        report = memory(self.graph, self.placement, self.settings, self.ipu, self.estimates)
        return report.fullest

    @property
    def cycles(self) -> int:
        """The number of cycles that one call takes."""
        return cycles(self.graph, self.placement, self.settings, self.ipu, self.model).total


def largest_batch(run: Run, limit: int = 2**16) -> int:
    """Return the largest number of samples per micro-batch that fits into memory, up to ``limit``.

    The result is 0 if one sample does not fit.
    """

    def fits(batch: int) -> bool:
        return replace(run, graph=run.graph.with_batch(batch)).fits

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


def best_splits(
    run: Run, stages: int, places: Sequence[int] | None = None, *, tries_all: bool = True
) -> Placement | None:
    """Return the placement on ``stages`` IPUs that makes the slowest stage as fast as possible.

    Every stage of the result fits into memory. Return None if no placement fits. The search uses
    dynamic programming. Whether a stage fits depends only on where the stage begins and ends. A
    search that tries all places therefore finds a placement that fits, if there is one.

    If there are many places where stages can begin, the search first tries some of the places. Then
    the search tries all places near the best places found. The slowest stage of the result may then
    be slower than necessary by the time of one or two operations.

    Args:
        run: The run. The placement of the run is not used.
        stages: The number of stages. Each stage gets its own IPU.
        places: The numbers of the operations that may be the first of a stage. None means the
            places that ``places_to_cut`` returns, or all operations if these places are too few.
        tries_all: Whether to try all places if there are many places and the first tries do not
            fit. This can take a minute.
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
        # If the last stage does not fit wherever it begins, a search is not necessary.
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
    """Return the ends of stages that fit, so that the slowest stage takes the least time.

    The result contains only places from ``ends``. Return None if the stages cannot fit. The optimum
    for unlimited memory decides which places the search tries first, and when the search stops.

    Args:
        ends: The numbers of the operations where a stage may begin or end.
        stages: The number of stages.
        work: A function that returns the time of a stage from its begin, end and number.
        fits: A function that tells whether a stage fits, from its begin, end and number.
    """
    ideal = _ideal(ends, stages, work)

    def options(stage: int, last: int) -> list[tuple[float, int]]:
        """Return each place where a stage may begin, with a lower bound of the slowest stage."""
        if not stage:
            return [(ideal[0][last], 0)]
        before = ideal[stage - 1]
        firsts = range(stage, last)
        return sorted((max(before[f], work(ends[f], ends[last], stage)), f) for f in firsts)

    @cache
    def best(stage: int, last: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the best split of the operations before ``ends[last]`` into the first stages.

        The number of the last of these stages is ``stage``.

        The result contains the time of the slowest stage, and the ends of the stages.
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
    """Return the least time of the slowest stage if memory were unlimited.

    The result has one list per stage, with one time for each place where the stage can end.
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


def cheapest_recomputation(run: Run) -> Run | None:
    """Return the run with the recomputation and checkpoints that fit and take the fewest cycles.

    Return None if the run does not fit with any recomputation.
    """
    fitting = [other for other in _recomputations(run) if other.fits]
    return min(fitting, key=lambda other: other.cycles, default=None)


def places_to_cut(graph: Graph) -> tuple[int, ...]:
    """Return the places where only one tensor passes from earlier operations to later ones.

    A place lies between two operations. The number of a place is the number of the operation behind
    the place.
    """
    return tuple(index for index, crossing in _crossings(graph) if len(crossing) == 1)


def with_checkpoints(graph: Graph, places: Sequence[int]) -> Graph:
    """Return a graph with recomputation checkpoints at the given places.

    A checkpoint keeps the tensors that pass from the operations before the place to later ones.
    """
    wanted = dict(_crossings(graph))
    marked = set()
    for place in places:
        for root in wanted[place]:
            writers = (o for o in graph.operations[:place] if graph.root_of[o.output.name] == root)
            marked |= {operation.name for operation in list(writers)[-1:]}
    return replace(
        graph,
        operations=tuple(
            replace(o, is_checkpoint=o.is_checkpoint or o.name in marked) for o in graph.operations
        ),
    )


def _crossings(graph: Graph) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield each place, with the roots of the tensors that pass from earlier to later operations.

    A place has the number of the operation behind the place. Tensors from the host do not count,
    because every stage may receive them.
    """
    last = {graph.root_of[n]: i for i, o in enumerate(graph.operations) for n in o.inputs}
    inputs = {tensor.name for tensor in graph.inputs}
    made: set[str] = set()
    for index, operation in enumerate(graph.operations):
        if index:
            yield index, frozenset(root for root in made if last.get(root, -1) >= index)
        made.add(graph.root_of[operation.output.name])
        made -= inputs


def _placement(cuts: Sequence[int]) -> Placement:
    """Return a placement with one stage between neighbouring cuts, each on its own IPU."""
    stages = [s for s in range(len(cuts) - 1) for _ in range(cuts[s + 1] - cuts[s])]
    return Placement(tuple(stages), tuple(range(len(cuts) - 1)))


def _work_between(run: Run, stages: int) -> Callable[[int, int, int], float]:
    """Return a function that computes the cycles of a stage for one micro-batch.

    The function's arguments are the stage's first operation, its end and its number. The function
    ignores checkpoints.
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
    """Return a function that tells whether a stage fits into memory.

    The function's arguments are the stage's first operation, its end and its number. The function
    saves time in two ways, which do not change its result. A stage does not fit if its variables
    alone are too large. A stage that fits also fits with a smaller stash of activations.
    """
    sums = [0, *accumulate(least_bytes(run.graph, run.settings))]
    room = (run.ipu.tiles - run.settings.io_tiles) * run.ipu.tile_bytes
    one_each = Placement(tuple(range(stages)), tuple(range(stages)))
    again = run.settings.recomputing(one_each)
    depths = [stash_depth(stage, stages, run.settings) for stage in range(stages)]
    # The results so far. The values are the largest stash depth that fits, and the smallest stash
    # depth that does not fit.
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
    """Return whether a stage with the operations from ``begin`` to ``end`` fits.

    The result does not depend on the ends of the other stages.
    """
    before = [*range(stage), begin] if stage else [0]
    count, after = len(run.graph.operations), stages - stage - 1
    rest = [*range(count - after + 1, count + 1)] if after else []
    placement = _placement([*before, end, *rest])
    return ipu_fits(run.graph, placement, run.settings, run.ipu, stage, run.estimates)


def _recomputations(run: Run) -> Iterator[Run]:
    """Yield the run with each kind of recomputation, then with fewer and fewer checkpoints."""
    for recompute in ("none", "norm", "stage"):
        yield replace(run, settings=replace(run.settings, recompute=recompute))
    places = places_to_cut(run.graph)
    settings = replace(run.settings, recompute="stage")
    every = 1
    while places and every <= len(places):
        graph = with_checkpoints(run.graph, places[every - 1 :: every])
        yield replace(run, graph=graph, settings=settings)
        every *= 2
