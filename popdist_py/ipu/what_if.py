"""What would fit: advice where something does not, and searches for what does.

Every answer is computed: the model is asked about the changed run.
Nothing here is searched for where a plain question to memory or cycles would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from popdist_py.ipu.cycles import CYCLE_MODEL, CycleModel, cycles, operation_cycles
from popdist_py.ipu.graph import Graph, Placement, Type
from popdist_py.ipu.memory import ESTIMATES, Estimates, IpuMemory, ipu_memory, memory
from popdist_py.ipu.settings import SGD, Location, Settings
from popdist_py.ipu.specification import IPU

__all__ = [
    "Advice",
    "OutOfMemory",
    "Run",
    "best_splits",
    "cheapest_recomputation",
    "explain",
    "largest_batch",
    "places_to_cut",
    "with_checkpoints",
]

_OFF_CHIP = Location(on_chip=False)


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


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that needs less memory.

    Attributes:
        change: what to do.
        saved: bytes less on the fullest IPU, whichever that is then.
        fits: whether everything fits with this change alone.
    """

    change: str
    saved: int
    fits: bool


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Why a run does not fit.

    Attributes:
        memory: of the IPU that lacks the most.
        tile_bytes: that a tile has.
        advice: what would help, what saves most first.
    """

    memory: IpuMemory
    tile_bytes: int
    advice: tuple[Advice, ...]

    def __str__(self) -> str:
        own = self.memory
        lines = [
            f"Out of memory on IPU {own.ipu}: {own.needed:,} bytes needed but only "
            f"{own.capacity:,} available ({own.per_tile:,} bytes a tile, tiles have "
            f"{self.tile_bytes:,}). Peak at {own.peak_at}.",
            "Largest contributions:",
            *(f"  {_megabytes(p.bytes)}  {p.category}: {p.name}" for p in own.largest()),
        ]
        if self.advice:
            lines.append("What would help, each alone:")
        for advice in self.advice:
            fits = ", then it fits" if advice.fits else ""
            lines.append(f"  {_megabytes(advice.saved)} less  {advice.change}{fits}")
        return "\n".join(lines)


def explain(run: Run) -> OutOfMemory | None:
    """Return why a run does not fit and what would help, None if it fits."""
    own = run.fullest
    if own.fits:
        return None
    found = []
    for change, other in _changes(run):
        after = other.fullest
        if after.needed < own.needed:
            found.append(Advice(change, own.needed - after.needed, after.fits))
    ordered = sorted(found, key=lambda advice: -advice.saved)
    return OutOfMemory(own, run.ipu.tile_bytes, tuple(ordered))


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


def best_splits(run: Run, stages: int) -> Placement | None:
    """Return the placement on ``stages`` IPUs that fits and whose slowest stage is fastest.

    Dynamic programming over the places where one tensor alone crosses, or all if there are too few;
    None if nothing fits.
    """
    places = [0, *places_to_cut(run.graph), len(run.graph.operations)]
    if len(places) < stages + 1:
        places = list(range(len(run.graph.operations) + 1))
    if len(places) < stages + 1:
        return None
    work = _work_between(run, stages)
    # For each number of stages and place: the least slowest stage, and where the last one begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        best.append({})
        is_last = stage == stages - 1
        for end in places[-1:] if is_last else places[stage + 1 : -1]:
            options = sorted(
                (max(slowest, work(begin, end, stage)), begin)
                for begin, (slowest, _) in best[stage].items()
                if begin < end
            )
            for slowest, begin in options:
                if _stage_fits(run, begin, end, stage, stages):
                    best[-1][end] = (slowest, begin)
                    break
    end = places[-1]
    if end not in best[stages]:
        return None
    cuts = [end]
    for stage in range(stages, 0, -1):
        cuts.insert(0, best[stage][cuts[0]][1])
    return _placement(cuts)


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


def _stage_fits(run: Run, begin: int, end: int, stage: int, stages: int) -> bool:
    """Return whether a stage of these operations fits; how the others are cut does not matter."""
    before = [*range(stage), begin] if stage else [0]
    count, after = len(run.graph.operations), stages - stage - 1
    rest = [*range(count - after + 1, count + 1)] if after else []
    if begin < stage or end > count - after:
        return False
    placement = _placement([*before, end, *rest])
    own = ipu_memory(run.graph, placement, run.settings, run.ipu, stage, run.estimates)
    return own.fits


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


def _changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Yield what may save memory: in the order of Graphcore's own tips."""
    graph, settings = run.graph, run.settings
    if graph.batch > 1:
        batch = graph.batch // 2
        yield (
            f"micro-batches of {batch}, not {graph.batch}",
            replace(run, graph=graph.with_batch(batch)),
        )
    types = {t.type for t in graph.tensors.values()} | {w.type for w in graph.weights}
    if "float32" in types:
        yield "half precision: all but second moments in float16", _in_half(run)
    if settings.is_training:
        yield from _training_changes(run)
    lower = replace(settings, memory_proportion=0.1)
    yield "an available memory proportion of 0.1", replace(run, settings=lower)
    if settings.partials != "float16":
        half_sums = replace(settings, partials="float16")
        yield "partials in float16", replace(run, settings=half_sums)
    if settings.is_pipelined and run.placement.num_stages > 1:
        splits = best_splits(run, run.placement.num_stages)
        if splits is not None:
            names = [graph.operations[splits.stages.index(s)].name for s in splits.ipus[1:]]
            yield f"stages that begin at {', '.join(names)}", replace(run, placement=splits)


def _in_half(run: Run) -> Run:
    """Return a run with the types of the half-precision example, the optimiser's among them."""
    graph = run.graph.cast(data="float16", weights="float16")
    optimizer = run.settings.optimizer
    first: tuple[Type, ...] = ("float16",) if optimizer.state else ()
    optimizer = replace(optimizer, accumulator="float16", state=(*first, *optimizer.state[1:]))
    return replace(run, graph=graph, settings=replace(run.settings, optimizer=optimizer))


def _training_changes(run: Run) -> Iterator[tuple[str, Run]]:
    settings = run.settings
    optimizer = settings.optimizer
    if settings.recompute_for(run.placement) == "none":
        again = replace(settings, recompute="stage")
        yield "recomputation", replace(run, settings=again)
    again = replace(settings, recompute="stage", recomputes_last=True)
    checkpoints = with_checkpoints(run.graph, places_to_cut(run.graph))
    yield "recomputation checkpoints", replace(run, graph=checkpoints, settings=again)
    yield (
        "optimiser state off the chip",
        replace(run, settings=replace(settings, optimizer_location=_OFF_CHIP)),
    )
    yield (
        "activations off the chip",
        replace(run, settings=replace(settings, activation_location=_OFF_CHIP)),
    )
    if settings.accumulation > 1 and optimizer.accumulator == "float32":
        sums = replace(settings, optimizer=replace(optimizer, accumulator="float16"))
        yield "gradient accumulators in float16", replace(run, settings=sums)
    if optimizer.state:
        plain = replace(SGD, accumulator=optimizer.accumulator)
        yield (
            "an optimiser without state (SGD)",
            replace(run, settings=replace(settings, optimizer=plain)),
        )
        if "float32" in optimizer.state:
            half: Type = "float16"
            states = replace(optimizer, state=(half,) * len(optimizer.state))
            yield (
                "optimiser state in float16",
                replace(run, settings=replace(settings, optimizer=states)),
            )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
