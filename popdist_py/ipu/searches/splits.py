"""The search for the fastest division of a model into stages that fits into memory.

The search compares the clock cycles of whole calls of the model, which the class ``DivisionCosts``
estimates. If a model has too many divisions, the search begins with a division whose slowest stage
is fast, and then moves the beginnings of its stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, pairwise, product
from math import comb
from typing import Final

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import least_accumulation
from popdist_py.ipu.searches.division_costs import (
    Cuts,
    DivisionCosts,
    Effort,
    EffortSpent,
    placement_of,
    shared_weights,
)
from popdist_py.ipu.searches.places import crossing_bytes
from popdist_py.ipu.searches.run import LIMITS, Run
from popdist_py.ipu.searches.slowest_stage import beginnings_that_fit, least_slowest

__all__ = ["best_splits", "with_micro_batches"]

# The search compares all divisions of a model if there are not more than ``_FEW_DIVISIONS``.
_FEW_DIVISIONS: Final = 3_000
# The number of places (possible beginnings of stages) that the search uses first, if a model has
# more places. The time for a balanced division grows with the square of the number of places.
_MANY_PLACES: Final = 64
# The distances, in places, by which the search moves the beginning of a stage.
_MOVES: Final = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)
# The number of moved divisions that the search compares at a time.
_TRIED: Final = 24
# Further moved divisions are compared only if they are estimated to take at most this many times as
# long as the division before the move.
_SLACK: Final = 1.03
# The number of divisions whose beginnings of stages the search moves.
_STARTS: Final = 2
# The largest number of lists of IPUs that a quick search compares.
_QUICK_LISTS: Final = 4
# The factors for the time of weight updates, which the search for balanced divisions tries.
_UPDATES: Final = (1.0, 0.0, 4.0)
# The largest number of times that the search moves beginnings of stages.
_ROUNDS: Final = 60


def best_splits(
    run: Run,
    stages: int,
    places: Sequence[int] | None = None,
    *,
    tries_all: bool = True,
    is_quick: bool = False,
    effort: Effort | None = None,
) -> Placement | None:
    """Return the division of a model among IPUs with which a call takes the fewest clock cycles.

    The returned placement has the verdict "fits", or the verdict "close" if no division fits. The
    function returns None if all divisions need too much memory.

    All operations that read the same weight run on the same IPU, because PopART refuses other
    programs. If the first and the last part of a model share a weight, the placement may therefore
    have one stage more than IPUs: the last stage then runs on the IPU of an earlier one.

    The returned division is the fastest of all if there are at most a few thousand divisions. In
    larger models, no division is faster in which one stage, or several consecutive stages, begin a
    few operations earlier or later, except for divisions that the search estimates to be slower.

    Args:
        run: The configuration of the run (graph, placement, settings and IPU). The placement in
            ``run`` is only compared with the divisions that the search finds.
        stages: The number of IPUs among which the model is divided. The stages run on IPU 0, IPU 1,
            and so on.
        places: The numbers of the operations where a stage may begin. If ``places`` is None, a
            stage may begin with every operation.
        tries_all: Whether to try all places where a stage may begin, if no list of IPUs has a
            division at a selection of the places that fits into memory. The search with all places
            can take a minute.
        is_quick: Whether to return the first division that is found. The slowest stage of this
            division is fast, but another division may need fewer clock cycles.
        effort: The number of operations whose memory the search may estimate. A search that has no
            effort left returns the best division that it has found.
    """
    count = len(run.graph.operations)
    inner = range(1, count) if places is None else sorted(set(places) - {0, count})
    if effort is not None and not effort.is_enough(count):
        return None
    lists = islice(_ipu_lists(run, stages), _QUICK_LISTS if is_quick else None)
    costs = DivisionCosts(run, range(stages), effort)
    searches = [_Search(costs.with_ipus(ipus), inner) for ipus in lists]
    for limit in LIMITS:
        # All places are tried only if no list of IPUs has a division at the selected places.
        for has_all_places in (False, True) if tries_all else (False,):
            found = []
            for search in searches:
                cuts = search.best(limit, tries_all=has_all_places, is_quick=is_quick)
                if cuts is not None:
                    found.append((search.costs.cycles(cuts), cuts, search.costs.ipus))
            if found:
                _, cuts, ipus = min(found)
                return placement_of(cuts, ipus)
    return None


def _ipu_lists(run: Run, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the possible lists with the IPU of each stage, for ``count`` IPUs."""
    yield tuple(range(count))
    if run.settings.is_phased or with_micro_batches(run, count + 1) is not run:
        return
    # The stage that shares a weight with the last one begins at the weight's first reader or
    # earlier. Stage n cannot begin before operation n.
    first = max((readers[0] for readers in shared_weights(run.graph)), default=-1)
    for ipu in range(min(count - 1, first + 1)):
        yield (*range(count), ipu)


def with_micro_batches(run: Run, stages: int) -> Run:
    """Return a run that has at least as many micro-batches as a pipeline of ``stages`` needs.

    If the run has enough micro-batches, the function returns ``run`` itself.
    """
    settings = run.settings
    least = least_accumulation(stages, is_training=settings.is_training)
    window = settings.accumulation if settings.is_training else settings.device_iterations
    if not settings.is_pipelined or window >= least:
        return run
    if settings.is_training:
        return replace(run, settings=replace(settings, accumulation=least))
    period = 1 if settings.output_mode == "every n" else settings.output_return_period
    more = replace(settings, device_iterations=least, output_return_period=period)
    return replace(run, settings=more)


class _Search:
    """The search for the best of all divisions that use the same list of IPUs."""

    def __init__(self, costs: DivisionCosts, inner: Sequence[int]) -> None:
        self.costs = costs
        self.inner = list(inner)
        self._index = {place: index for index, place in enumerate(self.inner)}
        self.stages = len(costs.ipus)
        # The stage on whose IPU the last stage also runs; None if the last stage has its own IPU.
        self.returns_to = None if costs.ipus[-1] == self.stages - 1 else costs.ipus[-1]
        self._sorted: list[tuple[float, Cuts]] | None = None

    def best(self, limit: float, *, tries_all: bool, is_quick: bool) -> Cuts | None:
        """Return the best division that needs at most a share of the memory, or None.

        Args:
            limit: The share of its memory that each tile may use.
            tries_all: Whether to try all places if none of a selection of places is suitable.
            is_quick: Whether to return a division before it is compared with similar ones.
        """
        costs = self.costs
        few = _FEW_DIVISIONS // 30 if is_quick else _FEW_DIVISIONS
        if comb(len(self.inner), self.stages - 1) <= few:
            fitting = (cuts for _, cuts in self._fastest_first() if costs.fits(cuts, limit))
            return next(fitting, None)
        if is_quick:
            some = self._selected(_MANY_PLACES // 2)
            quick = self._balanced(some, limit, _UPDATES[0]), self._own(limit)
            allowed = (cuts for cuts in quick if cuts is not None and costs.is_allowed(cuts))
            return min(allowed, key=costs.cycles, default=None)
        starts = self._starts(limit, tries_all=tries_all)
        moved = (self._moved(cuts, limit) for cuts in starts)
        return min(moved, key=costs.cycles, default=None)

    def _starts(self, limit: float, *, tries_all: bool) -> list[Cuts]:
        """Return good divisions that fit, as beginnings of a search."""
        selected = self._selected(_MANY_PLACES)
        found = [self._balanced(selected, limit, update) for update in _UPDATES]
        if tries_all and not any(found):
            found = [self._balanced(self.inner, limit, 0.0, tries_all=True)]
        found.append(self._own(limit))
        starts = {cuts for cuts in found if cuts is not None and self.costs.is_allowed(cuts)}
        return sorted(starts, key=self.costs.cycles)[:_STARTS]

    def _fastest_first(self) -> list[tuple[float, Cuts]]:
        """Return all divisions with their clock cycles, in the order of their clock cycles."""
        if self._sorted is None:
            costs = self.costs
            divisions = (
                (0, *cuts, costs.count) for cuts in combinations(self.inner, self.stages - 1)
            )
            allowed = (cuts for cuts in divisions if costs.is_allowed(cuts))
            self._sorted = sorted((costs.cycles(cuts), cuts) for cuts in allowed)
        return self._sorted

    def _selected(self, most: int) -> list[int]:
        """Return up to ``most`` places with similar distances that few bytes cross."""
        inner = self.inner
        step = max(1, -(-len(inner) // max(most, 2 * self.stages)))
        run = self.costs.run
        crossing = crossing_bytes(run.graph, is_training=run.settings.is_training)
        groups = (inner[i : i + step] for i in range(0, len(inner), step))
        return [min(group, key=lambda place: crossing[place]) for group in groups]

    def _own(self, limit: float) -> Cuts | None:
        """Return the division of the run itself, if the search may return it."""
        placement = self.costs.run.placement
        if placement.ipus != self.costs.ipus:
            return None
        begins = [placement.stages.index(stage) for stage in range(1, self.stages)]
        cuts = (0, *begins, self.costs.count)
        is_allowed = set(begins) <= set(self.inner) and self.costs.is_allowed(cuts)
        return cuts if is_allowed and self.costs.fits(cuts, limit) else None

    def _balanced(
        self, inner: Sequence[int], limit: float, update: float, *, tries_all: bool = False
    ) -> Cuts | None:
        """Return a division that fits and whose slowest IPU is estimated to be fast, or None.

        Args:
            inner: The places where stages may begin.
            limit: The share of its memory that each tile may use.
            update: The factor for the time of weight updates. Micro-batches have the factor 1.
            tries_all: Whether to also try divisions in which a part of a stage that fits may not
                fit itself.
        """
        rests: list[Cuts] = [(self.costs.count,)]
        if self.returns_to is not None:
            rests = [(begin, self.costs.count) for begin in self._last_begins(inner)]
        found = (
            self._balanced_before(rest, inner, limit, update, tries_all=tries_all) for rest in rests
        )
        return min(filter(None, found), key=self.costs.cycles, default=None)

    def _last_begins(self, inner: Sequence[int]) -> Iterable[int]:
        """Return places where the last stage may begin, just before operations that share weights.

        Earlier places are left out, because ``_moved`` moves the beginning of the stage to them.
        """
        shared = shared_weights(self.costs.run.graph)
        begins = set()
        for end in {readers[-1] for readers in shared}:
            begins |= {end, *[place for place in inner if place <= end][-3:]} & set(self.inner)
        return sorted(begins)

    def _balanced_before(
        self, rest: Cuts, inner: Sequence[int], limit: float, update: float, *, tries_all: bool
    ) -> Cuts | None:
        """Return a balanced division, given the places where the last stages begin and end.

        Args:
            rest: The number of the model's operations. If the last stage runs on another stage's
                IPU, the place where the last stage begins precedes this number.
            inner: The places where the other stages may begin.
            limit: The share of its memory that each tile may use.
            update: The factor for the time of weight updates.
            tries_all: Whether to try all places, and not only those of ``beginnings_that_fit``.
        """
        costs, stages = self.costs, self.stages - len(rest) + 1
        ends = [0, *(place for place in inner if place < rest[0]), rest[0]]
        if len(ends) <= stages:
            return None
        last = costs.estimated_work(*rest, self.stages - 1) if len(rest) == 2 else 0.0

        known: dict[tuple[int, int, bool, bool], float] = {}

        def work(begin: int, end: int, stage: int) -> float:
            key = begin, end, costs.recomputes(stage), stage == self.returns_to
            if key not in known:
                own = costs.estimated_work(begin, end, stage)
                own += update * costs.estimated_update(begin, end)
                known[key] = own + last if stage == self.returns_to else own
            return known[key]

        def has_room(begin: int, end: int, stage: int) -> bool:
            cuts = costs.cuts_around(begin, end, stage, rest)
            return cuts is not None and costs.stage_fits(cuts, stage, limit)

        def fits(begin: int, end: int, stage: int) -> bool:
            cuts = costs.cuts_around(begin, end, stage, rest)
            return (
                cuts is not None
                and not costs.separates(cuts, stage)
                and costs.stage_fits(cuts, stage, limit)
            )

        # If the last of the stages does not fit wherever it begins, no division fits.
        firsts = reversed(range(stages - 1, len(ends) - 1) if stages > 1 else range(1))
        try:
            if not any(fits(ends[first], rest[0], stages - 1) for first in firsts):
                return None
            windows = None if tries_all else beginnings_that_fit(ends, stages, has_room)
            if windows is None and not tries_all:
                return None
            found = least_slowest(ends, stages, work, fits, windows)
        except EffortSpent:
            return None
        return None if found is None else (*found, *rest[1:])

    def _moved(self, cuts: Cuts, limit: float) -> Cuts:
        """Return a division that fits and that no move of consecutive stages makes better.

        Of divisions with equal clock cycles, the one with the more equal stages is better: two
        moves may be necessary to make a model with two equally slow stages faster.
        """
        rank = self._rank(cuts)
        for _ in range(_ROUNDS):
            better = self._better(cuts, rank, limit)
            if better is None:
                return cuts
            rank, cuts = better
        return cuts

    def _better(
        self, cuts: Cuts, rank: tuple[int, float], limit: float
    ) -> tuple[tuple[int, float], Cuts] | None:
        """Return a moved division that fits and has a smaller rank, with its rank, or None."""
        for neighbours in (self._shifted(cuts), self._moved_apart(cuts)):
            estimated = sorted(neighbours)
            most = _SLACK * self.costs.estimated_cycles(cuts)
            fast = bisect_right(estimated, most, key=lambda each: each[0])
            estimated = estimated[: max(_TRIED, fast)]
            for begin in range(0, len(estimated), _TRIED):
                tried = (other for _, other in estimated[begin : begin + _TRIED])
                ranked = sorted((self._rank(other), other) for other in tried)
                ahead = ((new, other) for new, other in ranked if new < rank)
                found = next(((n, o) for n, o in ahead if self.costs.fits(o, limit)), None)
                if found is not None:
                    return found
        return None

    def _rank(self, cuts: Cuts) -> tuple[int, float]:
        return round(self.costs.cycles(cuts)), self.costs.inequality(cuts)

    def _shifted(self, cuts: Cuts) -> Iterator[tuple[float, Cuts]]:
        """Yield divisions in which consecutive stages all begin earlier, or all begin later."""
        for first, last in combinations(range(self.stages), 2):
            for move in (*_MOVES, *(-move for move in _MOVES)):
                moves = [move if first <= index < last else 0 for index in range(self.stages - 1)]
                yield from self._at(cuts, moves)

    def _moved_apart(self, cuts: Cuts) -> Iterator[tuple[float, Cuts]]:
        """Yield divisions in which two stages begin up to three places earlier or later."""
        for first, second in combinations(range(self.stages - 1), 2):
            for one, other in product(range(-3, 4), repeat=2):
                moves = [0] * (self.stages - 1)
                moves[first], moves[second] = one, other
                yield from self._at(cuts, moves)

    def _at(self, cuts: Cuts, moves: Sequence[int]) -> Iterator[tuple[float, Cuts]]:
        """Yield the division with moved stages and its estimated time, if it is allowed."""
        at = [self._index[cut] + move for cut, move in zip(cuts[1:-1], moves, strict=True)]
        if any(a >= b for a, b in pairwise([-1, *at, len(self.inner)])):
            return
        moved = (0, *(self.inner[i] for i in at), self.costs.count)
        if self.costs.is_allowed(moved):
            yield self.costs.estimated_cycles(moved), moved
