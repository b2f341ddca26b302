"""Searches for what fits, or is fastest: batches, splits, recomputation.

Every answer is computed: the model is asked about the changed run.
Nothing here is searched for where a plain question to memory or cycles would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from typing import Final

from popdist_py.ipu.cycles import CYCLE_MODEL, CycleModel, cycles, operation_cycles
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import (
    ESTIMATES,
    Estimates,
    ipu_fits,
    least_bytes,
    memory,
    stash_depth,
)
from popdist_py.ipu.memory_report import IpuMemory
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU

__all__ = [
    "Run",
    "best_splits",
    "cheapest_recomputation",
    "largest_batch",
    "least_slowest",
    "places_to_cut",
    "with_checkpoints",
]

# Of more places a search takes too long to try them all at first: it grows with their square.
_MANY_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the model asks about a run."""

    graph: Graph
    placement: Placement
    settings: Settings
    ipu: IPU
    estimates: Estimates = ESTIMATES
    model: CycleModel = CYCLE_MODEL

    @property
    def fits(self) -> bool:
        """Whether there is room on every IPU."""
        return memory(self.graph, self.placement, self.settings, self.ipu, self.estimates).fits

    @property
    def fullest(self) -> IpuMemory:
        """The IPU with the least room."""
        report = memory(self.graph, self.placement, self.settings, self.ipu, self.estimates)
        return report.fullest

    @property
    def cycles(self) -> int:
        """Cycles of a call."""
        return cycles(self.graph, self.placement, self.settings, self.ipu, self.model).total


def largest_batch(run: Run, limit: int = 2**16) -> int:
    """Return the most samples of a micro-batch that fit, 0 if not even one does."""

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
    """Return the placement on ``stages`` IPUs that fits and whose slowest stage is fastest.

    Dynamic programming: whether a stage fits depends on where it begins and ends, not on how the
    others are cut, so nothing that fits is missed. Of many places some are tried first, then those
    near the best of them: the slowest stage may be slower by an operation or two. None if nothing
    fits.

    Args:
        run: all but its placement.
        stages: how many, each on an IPU of its own.
        places: numbers of the operations before which a stage may begin. None for those where one
            tensor alone crosses, or all if there are too few of them.
        tries_all: whether all of many places are tried where those tried first do not fit, which
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
        # Where the last stage fits nowhere, nothing before it matters.
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
    """Return the places, of those given, between stages that fit and the slowest of which is least.

    What would be best if everything fitted says what to try first, and when to stop.
    """
    ideal = _ideal(ends, stages, work)

    def options(stage: int, last: int) -> list[tuple[float, int]]:
        """Return how slow the slowest is at least, with each place where the stage may begin."""
        if not stage:
            return [(ideal[0][last], 0)]
        before = ideal[stage - 1]
        firsts = range(stage, last)
        return sorted((max(before[f], work(ends[f], ends[last], stage)), f) for f in firsts)

    @cache
    def best(stage: int, last: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the least slowest of the stages up to one that ends at a place, and the cuts."""
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
    """Return, for each stage and place where it ends, the least slowest if everything fitted."""
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
    """Return the run with the recomputation and checkpoints that fit in the fewest cycles.

    None if none fits.
    """
    fitting = [other for other in _recomputations(run) if other.fits]
    return min(fitting, key=lambda other: other.cycles, default=None)


def places_to_cut(graph: Graph) -> tuple[int, ...]:
    """Return the numbers of the operations before which a single tensor crosses."""
    return tuple(index for index, crossing in _crossings(graph) if len(crossing) == 1)


def with_checkpoints(graph: Graph, places: Sequence[int]) -> Graph:
    """Return a graph that keeps what crosses before each of the operations named by number."""
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
    """Yield, for each operation but the first, the roots that it or later ones read from earlier.

    What the host sends does not count: every stage may have it.
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
    """Return the stages between neighbouring cuts, each on an IPU of its own."""
    stages = [s for s in range(len(cuts) - 1) for _ in range(cuts[s + 1] - cuts[s])]
    return Placement(tuple(stages), tuple(range(len(cuts) - 1)))


def _work_between(run: Run, stages: int) -> Callable[[int, int, int], float]:
    """Return a function of begin, end and stage: cycles of a micro-batch, checkpoints left out."""
    whole = Placement((0,) * len(run.graph.operations), (0,))
    forward, backward = operation_cycles(run.graph, whole, run.settings, run.ipu, run.model)
    sums = [0.0, *accumulate(forward)], [0.0, *accumulate(backward)]
    again = run.settings.recomputing(Placement(tuple(range(stages)), tuple(range(stages))))

    def work(begin: int, end: int, stage: int) -> float:
        times = 2 if stage in again else 1
        return times * (sums[0][end] - sums[0][begin]) + sums[1][end] - sums[1][begin]

    return work


def _fitting(run: Run, stages: int) -> Callable[[int, int, int], bool]:
    """Return a function of begin, end and stage: whether a stage of these operations fits.

    Two short cuts, both safe: the variables alone may be too much, and a stage that fits does so
    with a smaller stash as well.
    """
    sums = [0, *accumulate(least_bytes(run.graph, run.settings))]
    room = (run.ipu.tiles - run.settings.io_tiles) * run.ipu.tile_bytes
    one_each = Placement(tuple(range(stages)), tuple(range(stages)))
    again = run.settings.recomputing(one_each)
    depths = [stash_depth(stage, stages, run.settings) for stage in range(stages)]
    # The deepest stash that is known to fit, and the shallowest that is known not to.
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
    """Return whether a stage of these operations fits; how the others are cut does not matter."""
    before = [*range(stage), begin] if stage else [0]
    count, after = len(run.graph.operations), stages - stage - 1
    rest = [*range(count - after + 1, count + 1)] if after else []
    placement = _placement([*before, end, *rest])
    return ipu_fits(run.graph, placement, run.settings, run.ipu, stage, run.estimates)


def _recomputations(run: Run) -> Iterator[Run]:
    """Yield a run with every sort of recomputation, and checkpoints at ever fewer places."""
    for recompute in ("none", "norm", "stage"):
        yield replace(run, settings=replace(run.settings, recompute=recompute))
    places = places_to_cut(run.graph)
    settings = replace(run.settings, recompute="stage")
    every = 1
    while places and every <= len(places):
        graph = with_checkpoints(run.graph, places[every - 1 :: every])
        yield replace(run, graph=graph, settings=settings)
        every *= 2
