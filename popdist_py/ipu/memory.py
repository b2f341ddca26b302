"""The model of memory, which estimates the contents of every IPU's memory.

Weights, optimiser state, code, stream buffers and the stash are counted as always in memory. The
stash of a pipeline stage contains activations of earlier micro-batches, whose backward pass comes
later. Activations, gradients and other temporary data are counted at the moment when their sum is
largest.

The model of memory assumes that each tensor is spread over an IPU's tiles in grains, which are
small parts of equal size. All tensors begin on the same tile of an IPU, so many small tensors make
this tile fuller than the other tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Operation, Placement, Weight
from popdist_py.ipu.memory_contents import (
    Category,
    Contribution,
    IpuMemory,
    MemoryReport,
    verdict_of,
)
from popdist_py.ipu.placed_stage import PlacedStage, stage_of
from popdist_py.ipu.recomputation import kept
from popdist_py.ipu.settings import Location, Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.tensor_liveness import Moment, Peak, backward_moments, forward_moments, peak

__all__ = [
    "ESTIMATES",
    "Estimates",
    "category_of_block",
    "ipu_fits",
    "ipu_memory",
    "least_bytes",
    "memory",
    "stash_depth",
    "walks",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Constants of the model of memory, which are estimates because no document gives them.

    With the constants in ``ESTIMATES``, the model of memory predicts correctly which runs in
    Graphcore's publications fit into memory. The sizes of code are bytes per tile.

    Attributes:
        base_code: The size of the control code, stack and libraries that every program on the IPU
            contains.
        distinct_code: The size of the vertices (compute code) and exchange code for one pass of an
            operation. Operations of equal kind and sizes share this code.
        call_code: The size of the code that calls the code of one pass (forward or backward) of an
            operation.
        profile_code: The size of the code that counts the clock cycles of one pass of an operation
            for a profile. The number ``profile_code`` is assumed to be the size of two counters of
            4 bytes and four instructions.
        gaps: The unused memory between variables, as a share of the memory of all variables.
        grain: The number of consecutive bytes of a tensor that are stored on the same tile. The
            vectors of an IPU have 8 bytes, and its widest load instructions read 16 bytes.
    """

    base_code: int = 32 * 1024
    distinct_code: int = 448
    call_code: int = 48
    profile_code: int = 24
    gaps: float = 0.05
    grain: int = 16


ESTIMATES: Final = Estimates()

# The categories of memory contents that are code. Gaps between variables are not added to the code,
# because code does not contain variables.
_CODE: Final[tuple[Category, ...]] = ("code", "profiling")
# In phased execution, the forward pass of a phase (a part of the model) fetches weights from
# Streaming Memory. The backward pass also fetches gradient accumulators, and the weight update
# needs the weights and the accumulators.
_FETCHED: Final[tuple[Category, ...]] = ("weights", "accumulators")
# The names of the blocks of memory for gradients of activations begin with this text.
_GRADIENT: Final = "gradient of "


def memory(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    estimates: Estimates = ESTIMATES,
) -> MemoryReport:
    """Return the estimated contents of the memory of every IPU of a replica."""
    numbers = range(placement.num_ipus)
    return MemoryReport(
        tuple(ipu_memory(graph, placement, settings, ipu, n, estimates) for n in numbers)
    )


def ipu_memory(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    number: int,
    estimates: Estimates = ESTIMATES,
) -> IpuMemory:
    """Return the estimated contents of the memory of one IPU of a replica."""
    tiles = ipu.tiles - settings.io_tiles
    stages = [s for s, where in enumerate(placement.ipus) if where == number]
    parts = _always_live(graph, placement, settings, stages, tiles, estimates)
    at, rest = _worst(graph, placement, settings, ipu, number)
    parts += rest
    streams = [p for s in stages for p in _streams(graph, placement, settings, s)]
    if not settings.overlaps_io:
        parts += streams
    variables = sum(part.bytes for part in parts if part.category not in _CODE)
    gaps = round(variables * estimates.gaps)
    parts.append(Contribution("between variables", "gaps", gaps, True))
    return IpuMemory(
        ipu=number,
        tiles=tiles,
        tile_bytes=ipu.tile_bytes,
        contributions=tuple(parts),
        peak_at=at,
        fullest_tile=_fullest_tile(parts, tiles, estimates.grain),
        io_tiles=settings.io_tiles,
        fullest_io_tile=(
            estimates.base_code + _fullest_tile(streams, settings.io_tiles, estimates.grain)
            if settings.overlaps_io
            else 0
        ),
    )


def ipu_fits(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    ipu: IPU,
    number: int,
    estimates: Estimates = ESTIMATES,
) -> bool:
    """Return whether those stages of a model that run on one IPU fit into the IPU's memory.

    The stages do not fit if their verdict is "close". To save time, ``ipu_fits`` first checks only
    the data that always stays in memory.
    """
    tiles = ipu.tiles - settings.io_tiles
    stages = [s for s, where in enumerate(placement.ipus) if where == number]
    parts = _always_live(graph, placement, settings, stages, tiles, estimates)
    if verdict_of(_fullest_tile(parts, tiles, estimates.grain) / ipu.tile_bytes) != "fits":
        return False
    return ipu_memory(graph, placement, settings, ipu, number, estimates).fits


def _always_live(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    stages: Sequence[int],
    tiles: int,
    estimates: Estimates,
) -> list[Contribution]:
    """Return an IPU's data that is always in memory, without stream buffers and gaps."""
    parts = [part for stage in stages for part in _always(graph, placement, settings, stage)]
    return [*parts, *_code(graph, placement, settings, stages, tiles, estimates)]


def _fullest_tile(parts: Sequence[Contribution], tiles: int, grain: int) -> int:
    """Return the used bytes of an IPU's fullest tile, where every tensor begins."""
    return grain * sum(-(-part.bytes // (tiles * grain)) for part in parts)


def stash_depth(stage: int, stages: int, settings: Settings) -> int:
    """Return the number of micro-batches whose activations a pipeline stage keeps in its stash.

    The stash of a pipeline stage contains the activations of earlier micro-batches whose backward
    pass is still to come. The activations of the current micro-batch are not part of the stash. In
    PopART's pipeline of N stages, stage s keeps the activations of ``2 (N - 1 - s) + 1``
    micro-batches. In an interleaved pipeline, stage s keeps those of ``N - s`` micro-batches. The
    last stage of a pipeline does not need a stash.
    """
    if not settings.is_training or not settings.is_pipelined or stage == stages - 1:
        return 0
    return stages - stage if settings.strategy == "interleaved" else 2 * (stages - 1 - stage) + 1


def least_bytes(graph: Graph, settings: Settings) -> list[int]:
    """Return the bytes that each operation adds at least to the memory of its stage.

    An operation adds the size of those weights that the operation is the first to read. The size of
    a weight includes its gradient accumulator and its optimiser state.
    """
    if settings.is_phased:
        return [0] * len(graph.operations)
    seen: set[str] = set()
    found = []
    for operation in graph.operations:
        first = [name for name in operation.weights if name not in seen]
        seen.update(first)
        parts = (part for n in first for part in _variables(graph.weight_of[n], settings))
        found.append(sum(part.bytes for part in parts))
    return found


def _always(
    graph: Graph, placement: Placement, settings: Settings, stage: int
) -> Iterator[Contribution]:
    """Yield the variables and kept activations of a stage, which always stay in memory."""
    if not settings.is_phased:
        for weight in placement.weights_of(graph, stage):
            yield from _variables(weight, settings)
    depth = stash_depth(stage, placement.num_stages, settings)
    on_chip = settings.activation_location.on_chip
    if depth and on_chip:
        operations = tuple(placement.operations_of(graph, stage))
        here = PlacedStage(graph, operations, settings, placement.ipus[stage], 0, 0)
        for root in sorted(kept(here, settings.recompute_for(placement))):
            size = depth * graph.bytes_of(root)
            yield Contribution(_module(root), "stash", size, True)


def _variables(weight: Weight, settings: Settings) -> Iterator[Contribution]:
    """Yield the on-chip memory of a weight, of its accumulator and of its optimiser state."""
    replicas, optimizer = settings.replicas, settings.optimizer
    held = settings.weight_location.held(weight.elements, replicas)
    yield Contribution(weight.name, "weights", held * BYTES[weight.type], True)
    if not (settings.is_training and weight.is_trained):
        return
    if settings.has_accumulators:
        held = settings.accumulator_location.held(weight.elements, replicas)
        yield Contribution(weight.name, "accumulators", held * BYTES[optimizer.accumulator], True)
    held = settings.state_location.held(weight.elements, replicas)
    for type_ in optimizer.state if held else ():
        yield Contribution(weight.name, "optimiser state", held * BYTES[type_], True)


def _streams(
    graph: Graph, placement: Placement, settings: Settings, stage: int
) -> Iterator[Contribution]:
    """Yield the buffers for the tensors that a stage exchanges with the host."""
    if settings.synthetic_data:
        return
    operations = tuple(placement.operations_of(graph, stage))
    read = {name for operation in operations for name in operation.inputs}
    made = {operation.output.name for operation in operations}
    for tensor in graph.inputs:
        if tensor.name in read:
            yield Contribution(tensor.name, "streams", graph.bytes_of(tensor.name), True)
    for name in graph.outputs:
        if name in made:
            yield Contribution(_module(name), "streams", graph.bytes_of(name), True)


def _code(
    graph: Graph,
    placement: Placement,
    settings: Settings,
    stages: Sequence[int],
    tiles: int,
    estimates: Estimates,
) -> Iterator[Contribution]:
    """Yield the memory for the code on an IPU.

    Operations of equal kind and sizes share their code, so the code is counted once.
    """
    operations = [o for s in stages for o in placement.operations_of(graph, s)]
    distinct = {_signature(graph, operation): operation for operation in operations}
    several = sum(_passes(operation, settings) for operation in distinct.values())
    calls = sum(_passes(operation, settings) for operation in operations)
    parts = {
        "control and library": estimates.base_code,
        "vertices and exchange": estimates.distinct_code * several,
        "calls": estimates.call_code * calls,
    }
    for name, size in parts.items():
        yield Contribution(name, "code", size * tiles, True)
    if settings.is_profiled:
        size = estimates.profile_code * calls
        yield Contribution("counters of cycles", "profiling", size * tiles, True)


def _passes(operation: Operation, settings: Settings) -> int:
    """Return the number of programs that the forward and backward pass of an operation need.

    In training, a matrix product of an input and a weight needs three programs. The three programs
    compute the matrix product, the gradient of the input, and the gradient of the weight.
    """
    if operation.kind == "view":
        return 0
    if not settings.is_training:
        return 1
    return 3 if operation.weights and operation.kind == "product" else 2


def _signature(graph: Graph, operation: Operation) -> tuple[object, ...]:
    sizes = tuple(graph.tensors[name].elements for name in operation.inputs)
    return operation.kind, sizes, operation.output.elements, operation.product


def _worst(
    graph: Graph, placement: Placement, settings: Settings, ipu: IPU, number: int
) -> tuple[str, list[Contribution]]:
    """Return the operation at which an IPU needs the most memory, and the data in memory then.

    The returned data does not include weights and other data that always stays in memory.
    """
    found: list[tuple[str, list[Contribution]]] = [("nothing", [])]
    for fetched, moments in walks(graph, placement, settings, ipu, number):
        most = peak(moments)
        found.append((most.name, [*fetched, *_of_peak(most)]))
    return max(found, key=lambda entry: sum(part.bytes for part in entry[1]))


def walks(
    graph: Graph, placement: Placement, settings: Settings, ipu: IPU, number: int
) -> Iterator[tuple[list[Contribution], list[Moment]]]:
    """Yield an IPU's walks (lists of moments), and the data that is fetched for each walk.

    A moment is one pass (forward or backward) of an operation. Data that is fetched for a walk
    stays in memory during all moments of the walk. If a stage keeps its memory from the forward
    pass to the backward pass, one walk contains both passes of the stage. If a stage does not keep
    its memory between the passes, its forward pass and its backward pass are separate walks. In
    training, the weight update of a stage is also a separate walk.
    """
    for index in (s for s, where in enumerate(placement.ipus) if where == number):
        stage = stage_of(graph, placement, settings, ipu, index)
        weights = placement.weights_of(graph, index)
        fetched: list[Contribution] = []
        for sort, moments in zip(_FETCHED, _passes_of(stage, placement, index), strict=False):
            if settings.is_phased:
                fetched = [*fetched, *_fetched(weights, settings, sort)]
            yield fetched, moments
        if settings.is_training:
            # In phased execution, a weight update fetches the optimiser state of one weight at a
            # time from Streaming Memory. The memory for this update is therefore computed as if the
            # optimiser state were stored off the chip.
            optimizer = replace(settings.optimizer, is_combined=False)
            away = replace(
                settings, optimizer=optimizer, optimizer_location=Location(on_chip=False)
            )
            yield fetched, list(_update(weights, away if settings.is_phased else settings))


def _fetched(
    weights: Sequence[Weight], settings: Settings, category: Category
) -> list[Contribution]:
    """Return the weights or accumulators that an execution phase fetches from Streaming Memory."""
    on_chip = replace(settings, weight_location=Location(), accumulator_location=Location())
    parts = (part for weight in weights for part in _variables(weight, on_chip))
    return [replace(part, is_always_live=False) for part in parts if part.category == category]


def _passes_of(stage: PlacedStage, placement: Placement, index: int) -> Iterator[list[Moment]]:
    """Yield the moments of a stage's forward and backward pass.

    If the stage keeps its memory from the forward pass to the backward pass, one list contains the
    moments of both passes. If the stage does not keep its memory between the passes, each pass has
    its own list of moments.
    """
    settings = stage.settings
    forward = forward_moments(stage)
    if not settings.is_training:
        yield forward
        return
    recompute = settings.recompute_for(placement)
    if index not in settings.recomputing(placement):
        recompute = "none"
    backward = backward_moments(stage, kept(stage, recompute))
    apart = (
        settings.is_phased
        or not settings.activation_location.on_chip
        or stash_depth(index, placement.num_stages, settings)
    )
    if apart:
        yield forward
        yield backward
    else:
        yield [*forward, *backward]


def category_of_block(name: str) -> Category:
    """Return the category of a block of memory that is not always in use, from its name."""
    return "gradients" if name.startswith(_GRADIENT) else "activations"


def _of_peak(found: Peak) -> Iterator[Contribution]:
    """Yield the blocks of memory in use at the moment that needs the most memory."""
    for name, size in found.live.items():
        module = _module(name.removeprefix(_GRADIENT))
        yield Contribution(module, category_of_block(name), size, False)
    if found.temporary:
        yield Contribution(found.name, "working set", found.temporary, False)


def _update(weights: Sequence[Weight], settings: Settings) -> Iterator[Moment]:
    """Yield the moments of a stage's weight update, in which the weights are updated in turn."""
    for weight in weights:
        if weight.is_trained:
            yield Moment(f"{weight.name} (update)", temporary=_update_bytes(weight, settings))


def _update_bytes(weight: Weight, settings: Settings) -> int:
    """Return the bytes that a weight needs temporarily while the optimiser updates it.

    An optimiser with state computes the change of the weight, which has the weight's type. An
    optimiser without state adds the gradient to the weight in place. If the state is divided among
    the replicas, each replica updates its part, and then gathers the other parts of the weight.
    """
    optimizer, width, replicas = settings.optimizer, BYTES[weight.type], settings.replicas
    where = settings.state_location
    part = where.part(weight.elements, replicas)
    size = part * width if optimizer.state else 0
    if where.is_off_chip(weight.elements):
        size += part * sum(BYTES[type_] for type_ in optimizer.state)
    if optimizer.state and part < weight.elements:
        summed = BYTES[optimizer.accumulator] if settings.has_accumulators else width
        gathered = 0 if settings.weight_location.is_sharded else weight.bytes
        size = max(size + part * summed, part * width + gathered)
    if settings.is_phased:
        return size  # The phase has fetched its weights and accumulators before the update.
    if settings.weight_location.is_off_chip(weight.elements):
        size += settings.weight_location.part(weight.elements, replicas) * width
    accumulated = settings.accumulator_location
    if settings.has_accumulators and accumulated.is_off_chip(weight.elements):
        size += accumulated.part(weight.elements, replicas) * BYTES[optimizer.accumulator]
    return size


def _module(tensor: str) -> str:
    return tensor.removesuffix(":out")
