"""Search algorithms for the largest batch, best stages and cheapest recomputation that fit.

A search changes the configuration of a run in many ways, and estimates the memory and time of each
changed configuration. The modules ``memory`` and ``cycles`` estimate the memory and the time of a
single configuration.
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

# The largest number of places (possible beginnings of stages) for which a search for the best
# stages tries all places at once. The time of a search for the best stages grows with the square of
# the number of places (possible beginnings of stages).
_MANY_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class Run:
    """The configuration of a run: all values that determine its memory and clock cycles."""

    graph: Graph
    placement: Placement
    settings: Settings
    ipu: IPU
    estimates: Estimates = ESTIMATES
    model: CycleModel = CYCLE_MODEL

    @property
    def fits(self) -> bool:
        """Whether the model fits into the memory of every IPU with this configuration."""
        return memory(self.graph, self.placement, self.settings, self.ipu, self.estimates).fits

    @property
    def fullest(self) -> IpuMemory:
        """The data and code in the memory of the IPU that contains the fullest tile."""
        report = memory(self.graph, self.placement, self.settings, self.ipu, self.estimates)
        return report.fullest

    @property
    def cycles(self) -> int:
        """The number of clock cycles that one call of the model takes."""
        return cycles(self.graph, self.placement, self.settings, self.ipu, self.model).total


def largest_batch(run: Run, limit: int = 2**16) -> int:
    """Return the largest micro-batch (number of samples) that fits into memory, up to ``limit``.

    The function returns 0 if a micro-batch of one sample does not fit into memory.
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


def cheapest_recomputation(run: Run) -> Run | None:
    """Return the configuration with the fastest kind of recomputation that fits into memory.

    The function returns None if the model does not fit into memory with any kind of recomputation
    of activations.
    """
    fitting = [other for other in _recomputations(run) if other.fits]
    return min(fitting, key=lambda other: other.cycles, default=None)


def places_to_cut(graph: Graph) -> tuple[int, ...]:
    """Return the places between operations that only one tensor crosses.

    A place (a possible beginning of a stage) lies between two consecutive operations. The number of
    a place (a possible beginning of a stage between two operations) is the number of the operation
    after the place.
    """
    return tuple(index for index, crossing in _crossings(graph) if len(crossing) == 1)


def with_checkpoints(graph: Graph, places: Sequence[int]) -> Graph:
    """Return a graph that keeps the tensors at the given places as recomputation checkpoints.

    A tensor is at a place if an operation before the place computes it and a later operation reads
    it.
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
    """Yield each place between two operations, with the earlier tensors that are read after it.

    A tensor crosses a place if an operation before the place computes it and a later operation
    reads it. The function gives the crossing tensors as the names of their roots (the tensors that
    own the memory).

    The number of a place (a possible beginning of a stage between two operations) is the number of
    the operation after the place. The crossing tensors do not include input tensors from the host,
    because every stage may receive inputs from the host.
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


def _recomputations(run: Run) -> Iterator[Run]:
    """Yield the run with each kind of recomputation, then with ever fewer checkpoints."""
    for recompute in ("none", "norm", "stage"):
        yield replace(run, settings=replace(run.settings, recompute=recompute))
    places = places_to_cut(run.graph)
    settings = replace(run.settings, recompute="stage")
    every = 1
    while places and every <= len(places):
        graph = with_checkpoints(run.graph, places[every - 1 :: every])
        yield replace(run, graph=graph, settings=settings)
        every *= 2
