"""How much memory one stage needs while it runs: a walk over forward, recomputation and backward.

Each operation makes blocks of memory and reads blocks; a block is live from the moment that makes
it to the last that reads it. What always stays on the chip (weights, stash) is not counted here.
Nothing here knows how stages follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Operation, Placement, Product, Type
from popdist_py.ipu.settings import Recompute, Settings
from popdist_py.ipu.specification import IPU

__all__ = [
    "Moment",
    "Peak",
    "Segment",
    "Stage",
    "backward_moments",
    "forward_moments",
    "kept",
    "live_at",
    "peak",
    "segments",
    "shapes",
    "stage_of",
    "working_set",
]

# A convolution's block of the input with its border, in parts of what its positions read alone:
# 2 is that of 5 x 5 positions and a kernel of 3 x 3.
_BORDER: Final = 2.0
# The planner counts operands before and after rearranging, partials and their sums. This factor is
# its count, divided by the bytes that the tiles hold at a time. No source gives it. The memory and
# cycles of ResNet-101 over two IPUs are published: with more than 6, the default proportion would
# divide one of its products, and the model would no longer agree with these figures.
_PLANNED: Final = 6


@dataclass(frozen=True, slots=True)
class Moment:
    """One operation as memory sees it.

    Attributes:
        name: of the operation and its pass.
        reads: names of blocks.
        makes: bytes of blocks that have to be there; those that are already stay as they are.
        temporary: bytes for this moment alone.
    """

    name: str
    reads: tuple[str, ...] = ()
    makes: Mapping[str, int] = field(default_factory=dict)
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment that needs the most.

    Attributes:
        name: of the moment.
        live: bytes of each block that is live then.
        temporary: bytes for this moment alone.
    """

    name: str
    live: Mapping[str, int]
    temporary: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.live.values()) + self.temporary


@dataclass(frozen=True)
class Stage:
    """What one stage of a graph runs, and on what.

    Attributes:
        graph: the whole forward.
        operations: those of the stage.
        settings: of the run.
        ipu: which one, for its available memory proportion.
        tiles: that compute.
        memory: bytes of an IPU, of which the proportion is taken.
    """

    graph: Graph
    operations: tuple[Operation, ...]
    settings: Settings
    ipu: int
    tiles: int
    memory: int

    def limit(self, operation: Operation) -> float:
        """Return the bytes of an operation's product that the tiles may hold at a time.

        They follow from the operation's available memory proportion, or else from the IPU's.
        """
        proportion = operation.memory_proportion
        if proportion is None:
            is_convolution = _is_convolution(operation)
            proportion = self.settings.proportion(self.ipu, is_convolution=is_convolution)
        return proportion * self.memory / _PLANNED

    def partials(self, operation: Operation) -> Type:
        """Return the type of the sums inside an operation's product."""
        return self.settings.partials_of(is_convolution=_is_convolution(operation))

    @cached_property
    def fetches(self) -> bool:
        """Whether some weights or accumulators are not whole on the chip all the time."""
        weights, settings = self.settings.weight_location, self.settings
        is_whole = weights.on_chip and not weights.is_sharded
        return not (settings.is_phased or (is_whole and settings.accumulator_location.on_chip))

    @cached_property
    def saved(self) -> frozenset[str]:
        """Roots of tensors that the backward reads."""
        return frozenset(self.graph.root_of[name] for o in self.operations for name in o.saved)

    @cached_property
    def incoming(self) -> frozenset[str]:
        """Roots of tensors that other stages or the host send."""
        made = {operation.output.name for operation in self.operations}
        names = {name for o in self.operations for name in o.inputs} - made
        return frozenset(self.graph.root_of[name] for name in names)

    @cached_property
    def outgoing(self) -> frozenset[str]:
        """Roots of tensors that other stages or the host read."""
        own = {operation.name for operation in self.operations}
        others = (o for o in self.graph.operations if o.name not in own)
        read = {name for o in others for name in o.inputs} | set(self.graph.outputs)
        made = {operation.output.name for operation in self.operations}
        return frozenset(self.graph.root_of[name] for name in read & made)


def _is_convolution(operation: Operation) -> bool:
    return operation.product is not None and operation.product.is_convolution


def stage_of(graph: Graph, placement: Placement, settings: Settings, ipu: IPU, stage: int) -> Stage:
    """Return one stage with what memory and time of it depend on."""
    return Stage(
        graph=graph,
        operations=tuple(placement.operations_of(graph, stage)),
        settings=settings,
        ipu=placement.ipus[stage],
        tiles=ipu.tiles - settings.io_tiles,
        memory=(ipu.tiles - settings.io_tiles) * ipu.tile_bytes,
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a stage whose backward runs as one.

    Attributes:
        operations: in the order of the forward.
        again: those of them that are done again first.
    """

    operations: tuple[Operation, ...]
    again: tuple[Operation, ...]


def live_at(moments: Sequence[Moment]) -> Iterator[tuple[Mapping[str, int], int]]:
    """Yield, for each moment, the blocks that are live and the bytes of all that is there then.

    The blocks are one mapping, which changes with the next moment.
    """
    last = {name: i for i, m in enumerate(moments) for name in (*m.reads, *m.makes)}
    ending: dict[int, list[str]] = {}
    for name, index in last.items():
        ending.setdefault(index, []).append(name)
    live: dict[str, int] = {}
    total = 0
    for index, moment in enumerate(moments):
        for name, size in moment.makes.items():
            if name not in live:
                live[name] = size
                total += size
        yield live, total + moment.temporary
        for name in ending.get(index, ()):
            total -= live.pop(name, 0)


def peak(moments: Sequence[Moment]) -> Peak:
    """Return the moment with the most live bytes; of equal ones the first."""
    found, most = Peak("nothing", {}, 0), -1
    for moment, (live, total) in zip(moments, live_at(moments), strict=True):
        if total > most:
            most = total
            found = Peak(moment.name, dict(live), moment.temporary)
    return found


def kept(stage: Stage, recompute: Recompute) -> frozenset[str]:
    """Return the roots of the tensors that a stage keeps for its backward."""
    root_of = stage.graph.root_of
    if recompute == "none":
        return stage.saved
    marked = {root_of[o.output.name] for o in stage.operations if o.is_checkpoint}
    if recompute == "stage":
        return frozenset(marked | stage.incoming)
    kinds: dict[str, set[str]] = {}
    for operation in stage.operations:
        kinds.setdefault(root_of[operation.output.name], set()).add(operation.kind)
    for operation in stage.operations:
        if operation.kind == "elementwise" and operation.inputs:
            source = root_of[operation.inputs[0]]
            kinds[root_of[operation.output.name]] |= kinds.get(source, {"input"}) - {"view"}
    cheap = {
        root
        for root, of_root in kinds.items()
        if "norm" in of_root and of_root <= {"norm", "elementwise", "view"}
    }
    return frozenset((stage.saved - cheap) | marked | stage.incoming)


def segments(stage: Stage, keeps: frozenset[str]) -> tuple[Segment, ...]:
    """Return the parts of a stage between moments at which only what is kept is needed later."""
    root_of = stage.graph.root_of
    last_read: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        for name in operation.inputs:
            last_read[root_of[name]] = index
    made: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        made.setdefault(root_of[operation.output.name], index)
    # How many blocks that are not kept are needed across the place behind each operation.
    crossing = [0] * (len(stage.operations) + 1)
    for root, first in made.items():
        if root not in keeps and last_read.get(root, first) > first:
            crossing[first] += 1
            crossing[last_read[root]] -= 1
    cuts, open_blocks = [0], 0
    for index in range(len(stage.operations)):
        open_blocks += crossing[index]
        if not open_blocks:
            cuts.append(index + 1)
    return tuple(
        Segment(part, _again(stage, part, keeps))
        for begin, end in pairwise(cuts)
        if (part := stage.operations[begin:end])
    )


def _again(
    stage: Stage, operations: Sequence[Operation], keeps: frozenset[str]
) -> tuple[Operation, ...]:
    """Return what has to run again so that everything saved is there.

    Where something is made again, what came in is kept as it came: what works in place on it has to
    run again too.
    """
    if stage.saved <= keeps:
        return ()
    root_of = stage.graph.root_of
    needed = {root_of[name] for o in operations for name in o.saved} - keeps - stage.incoming
    again = []
    for operation in reversed(operations):
        root = root_of[operation.output.name]
        if root in needed or (operation.is_in_place and root in stage.incoming):
            again.append(operation)
            needed |= {root_of[name] for name in operation.inputs} - keeps - stage.incoming
    return tuple(reversed(again))


def forward_moments(stage: Stage) -> list[Moment]:
    """Return the forward of one micro-batch; what leaves the stage is live to the end."""
    sizes = stage.graph.root_bytes
    moments = [Moment("receive", (), {root: sizes[root] for root in sorted(stage.incoming)})]
    moments += [
        _forward(stage, operation, "forward", frozenset()) for operation in stage.operations
    ]
    return [*moments, Moment("send", tuple(sorted(stage.outgoing)))]


def backward_moments(stage: Stage, keeps: frozenset[str]) -> list[Moment]:
    """Return the backward of one micro-batch with the recomputation that it needs.

    What is kept is there from its first use on; names of blocks are those of the forward.
    """
    root_of, sizes = stage.graph.root_of, stage.graph.root_bytes
    gradients = {_gradient(r): sizes[r] for r in stage.outgoing if r in stage.graph.gradient_roots}
    moments = [Moment("receive gradients", (), gradients)]
    for segment in reversed(segments(stage, keeps)):
        fresh = frozenset(root_of[operation.output.name] for operation in segment.again) - keeps
        moments += [_forward(stage, o, "recompute", fresh) for o in segment.again]
        moments += [_backward(stage, o, fresh) for o in reversed(segment.operations)]
    sent = [_gradient(r) for r in stage.incoming if r in stage.graph.gradient_roots]
    return [*moments, Moment("send gradients", tuple(sorted(sent)))]


def _forward(stage: Stage, operation: Operation, name: str, fresh: frozenset[str]) -> Moment:
    """Return the forward of an operation; blocks in ``fresh`` are made for the second time."""
    root_of, sizes = stage.graph.root_of, stage.graph.root_bytes
    blocks = [root_of[n] for n in (*operation.inputs, operation.output.name)]
    named = {_block(root, fresh): sizes[root] for root in blocks}
    temporary = _product_bytes(stage, operation, backward=False) + _fetched(stage, operation, 1)
    return Moment(f"{operation.name} ({name})", tuple(named), named, temporary)


def _backward(stage: Stage, operation: Operation, fresh: frozenset[str]) -> Moment:
    """Return the backward of an operation: gradients of what it read, and of its weights."""
    graph, sizes = stage.graph, stage.graph.root_bytes
    root_of = graph.root_of
    saved = {_block(r, fresh): sizes[r] for r in (root_of[n] for n in operation.saved)}
    inputs = [root_of[name] for name in operation.inputs]
    made = {_gradient(r): sizes[r] for r in inputs if r in stage.graph.gradient_roots}
    trained = [graph.weight_of[n] for n in operation.weights if graph.weight_of[n].is_trained]
    weights = sum(weight.elements for weight in trained)
    type_of_gradient = operation.output.type
    if stage.settings.accumulation > 1:
        if operation.kind == "lookup":
            weights = 0  # rows are added to the accumulator where they belong
        elif operation.product is not None:
            weights //= operation.product.serial  # each part is added before the next is made
    temporary = (
        weights * BYTES[type_of_gradient]
        + _product_bytes(stage, operation, backward=True)
        + _fetched(stage, operation, 2)
    )
    reads = (_gradient(root_of[operation.output.name]), *saved)
    return Moment(f"{operation.name} (backward)", reads, saved | made, temporary)


def _fetched(stage: Stage, operation: Operation, passes: int) -> int:
    """Return the bytes of weights, and in the backward of accumulators, that are fetched."""
    settings, total = stage.settings, 0
    if not stage.fetches or not operation.weights:
        return 0
    for name in operation.weights:
        weight = stage.graph.weight_of[name]
        where = settings.weight_location
        sharded = where.part(weight.elements, settings.replicas) < weight.elements
        if where.is_off_chip(weight.elements) or sharded:
            total += weight.bytes
        gathers = settings.accumulator_location.is_off_chip(weight.elements)
        if passes == 2 and gathers and weight.is_trained and settings.accumulation > 1:
            total += weight.elements * BYTES[settings.optimizer.accumulator]
    return total


def _block(root: str, fresh: frozenset[str]) -> str:
    return f"{root} again" if root in fresh else root


def _gradient(root: str) -> str:
    return f"gradient of {root}"


def _product_bytes(stage: Stage, operation: Operation, *, backward: bool) -> int:
    """Return the working set of an operation's products, as large as the proportion lets it be."""
    if operation.product is None:
        return 0
    product = _read(operation, operation.product, stage.graph)
    types = operation.output.type, stage.partials(operation)
    sizes = bool(operation.weights), stage.graph.batch, backward
    return min(round(stage.limit(operation)), _held(product, *sizes, *types, stage.tiles))


@lru_cache(maxsize=4096)
def _held(
    product: Product,
    has_weights: bool,
    batch: int,
    backward: bool,
    operands: Type,
    partials: Type,
    tiles: int,
) -> int:
    """Return what the tiles hold during the largest product of a pass if nothing bounds it."""
    each = _shapes(product, batch, has_weights=has_weights, backward=backward)
    return max(working_set(shape, operands, partials, tiles) for shape in each) // product.serial


def shapes(operation: Operation, graph: Graph, *, backward: bool) -> tuple[Product, ...]:
    """Return the products of a pass over one micro-batch, which is in their sizes.

    The backward has two: gradients of the first operand, and of the second. That of a convolution's
    input is a convolution too: it reads each gradient as often as the forward reads each input. Of
    a repeated product they are those of all times, with ``repeats``.
    """
    if operation.product is None:
        return ()
    product = _read(operation, operation.product, graph)
    has_weights = bool(operation.weights)
    return _shapes(product, graph.batch, has_weights=has_weights, backward=backward)


def _shapes(
    product: Product, batch: int, *, has_weights: bool, backward: bool
) -> tuple[Product, ...]:
    rows, count = product.rows, product.count
    # Weights are the same for all samples, other operands are not.
    rows, count = (rows * batch, count) if has_weights else (rows, count * batch)
    one = replace(product, rows=rows, count=count, serial=1)
    if not backward:
        return (one,)
    depth, columns = round(product.columns * product.reads), round(product.depth / product.reads)
    return (
        replace(one, depth=depth, columns=max(1, columns)),
        replace(one, rows=product.depth, depth=rows),
    )


def _read(operation: Operation, product: Product, graph: Graph) -> Product:
    """Return a product with how often it reads its first operand: positions of a kernel, mostly."""
    if not operation.weights or not operation.inputs:
        return product
    elements = graph.tensors[operation.inputs[0]].elements
    reads = max(1.0, product.rows * product.depth * product.count / max(1, elements))
    return replace(product, reads=reads)


@lru_cache(maxsize=4096)
def working_set(product: Product, operands: Type, partials: Type, tiles: int) -> int:
    """Return the bytes of operands and partials that the tiles hold during a product.

    Each tile does an equal block of rows, depth and columns and holds what the block needs: least
    where its sides are equal, as far as the product's own sides let them be. Positions of a
    convolution side by side share most of what they read, all but a border about as large again.
    """
    blocks = max(1.0, tiles / product.count)
    sides = [float(product.rows), float(product.depth), float(product.columns)]
    volume = sides[0] * sides[1] * sides[2] / blocks
    block = [0.0, 0.0, 0.0]
    rest = volume
    order = sorted(range(3), key=lambda i: sides[i])
    for place, index in enumerate(order):
        block[index] = min(sides[index], max(1.0, rest ** (1 / (3 - place))))
        rest /= block[index]
    rows, depth, columns = block
    first = rows * depth * min(1.0, _BORDER / product.reads)
    held = (first + depth * columns) * BYTES[operands] + rows * columns * BYTES[partials]
    return round(held * min(tiles, blocks * product.count))
