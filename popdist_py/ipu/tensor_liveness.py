"""The memory that a stage of a model needs in forward pass, recomputation and backward pass.

A moment is the forward or backward pass of a single operation. A moment makes (allocates) blocks of
memory and reads blocks of memory. A block of memory is live (in use) from the moment that makes the
block to the last moment that reads the block. The module ``tensor_liveness`` does not count weights
and other data that always stay in memory. The module ``tensor_liveness`` does not depend on the
order of pipeline stages.
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
    "PlacedStage",
    "Segment",
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

# The factor by which the border of a kernel enlarges the part of a convolution's input that a tile
# reads. For example, 5 x 5 output positions of a convolution with a 3 x 3 kernel read 7 x 7 input
# positions, about twice as many.
_BORDER: Final = 2.0
# The library PopLibs estimates the temporary memory of a matrix product by adding its operands
# before and after rearranging, its partial sums, and their sums. ``_PLANNED`` is the temporary
# memory that PopLibs estimates, divided by the bytes that the tiles use at one time. No document of
# Graphcore gives the number ``_PLANNED``. The memory and cycles of ResNet-101 over two IPUs are
# published. If ``_PLANNED`` were above 6, the default memory proportion would divide one matrix
# product of ResNet-101 into parts. The estimates would then contradict the published figures.
_PLANNED: Final = 6


@dataclass(frozen=True, slots=True)
class Moment:
    """One pass (forward or backward) of an operation, with the blocks of memory that it uses.

    Attributes:
        name: The names of the operation and of the pass, such as ``conv1 (backward)``.
        reads: The names of the blocks of memory that the pass reads.
        makes: The name and size in bytes of each block of memory that the pass needs. The pass
            allocates each memory block in ``makes`` that is not in memory yet.
        temporary: The bytes of memory that are needed only during this pass.
    """

    name: str
    reads: tuple[str, ...] = ()
    makes: Mapping[str, int] = field(default_factory=dict)
    temporary: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment (pass of a single operation) that needs the most memory.

    Attributes:
        name: The name of the operation and of its pass.
        live: The name and size in bytes of each memory block that is in use at this moment.
        temporary: The bytes of memory that are needed only during this pass of the operation.
    """

    name: str
    live: Mapping[str, int]
    temporary: int

    @property
    def bytes(self) -> int:
        """The bytes of all blocks in memory and of the temporary memory together."""
        return sum(self.live.values()) + self.temporary


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a model, with the options and figures of the IPU that runs the stage.

    Attributes:
        graph: The graph of the model's whole forward pass.
        operations: The operations of the stage, in execution order.
        settings: The options of the run, such as the number of replicas.
        ipu: The number of the IPU that runs the stage. The available memory proportion can differ
            between IPUs.
        tiles: The number of tiles of the IPU that compute. The attribute ``tiles`` does not count
            I/O tiles, which only transfer data.
        memory: The memory in bytes of the tiles that compute. The available memory proportion (a
            PopTorch option) is a share of ``memory``.
    """

    graph: Graph
    operations: tuple[Operation, ...]
    settings: Settings
    ipu: int
    tiles: int
    memory: int

    def limit(self, operation: Operation) -> float:
        """Return the most bytes that an operation's matrix product may use at the same time.

        The available memory proportion of the operation limits this number of bytes. An operation
        without its own available memory proportion uses the proportion of its IPU.
        """
        proportion = operation.memory_proportion
        if proportion is None:
            is_convolution = _is_convolution(operation)
            proportion = self.settings.proportion(self.ipu, is_convolution=is_convolution)
        return proportion * self.memory / _PLANNED

    def partials(self, operation: Operation) -> Type:
        """Return the element type of the partial sums inside an operation's matrix product."""
        return self.settings.partials_of(is_convolution=_is_convolution(operation))

    @cached_property
    def fetches(self) -> bool:
        """Whether operations fetch weights or accumulators that the IPU does not store completely.

        In phased execution, ``fetches`` is False, because each phase (a part of the model) fetches
        all its data before it runs.
        """
        weights, settings = self.settings.weight_location, self.settings
        is_whole = weights.on_chip and not weights.is_sharded
        return not (settings.is_phased or (is_whole and settings.accumulator_location.on_chip))

    @cached_property
    def saved(self) -> frozenset[str]:
        """The names of the tensors whose memory the backward pass of the stage reads."""
        return frozenset(self.graph.root_of[name] for o in self.operations for name in o.saved)

    @cached_property
    def incoming(self) -> frozenset[str]:
        """The names of the tensors that the stage receives from other stages or from the host."""
        made = {operation.output.name for operation in self.operations}
        names = {name for o in self.operations for name in o.inputs} - made
        return frozenset(self.graph.root_of[name] for name in names)

    @cached_property
    def outgoing(self) -> frozenset[str]:
        """The names of the stage's tensors that other stages or the host read."""
        own = {operation.name for operation in self.operations}
        others = (o for o in self.graph.operations if o.name not in own)
        read = {name for o in others for name in o.inputs} | set(self.graph.outputs)
        made = {operation.output.name for operation in self.operations}
        return frozenset(self.graph.root_of[name] for name in read & made)


def _is_convolution(operation: Operation) -> bool:
    return operation.product is not None and operation.product.is_convolution


def stage_of(
    graph: Graph, placement: Placement, settings: Settings, ipu: IPU, stage: int
) -> PlacedStage:
    """Return one stage of a model, with all values that determine its memory and time."""
    return PlacedStage(
        graph=graph,
        operations=tuple(placement.operations_of(graph, stage)),
        settings=settings,
        ipu=placement.ipus[stage],
        tiles=ipu.tiles - settings.io_tiles,
        memory=(ipu.tiles - settings.io_tiles) * ipu.tile_bytes,
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stage whose operations are recomputed together, before their backward pass.

    Attributes:
        operations: The operations of this part of the stage, in the order of the forward pass.
        again: The operations that are recomputed just before the backward pass of ``operations``.
    """

    operations: tuple[Operation, ...]
    again: tuple[Operation, ...]


def live_at(moments: Sequence[Moment]) -> Iterator[tuple[Mapping[str, int], int]]:
    """Yield, for each moment, the memory blocks in use and the bytes of all used memory.

    The function yields the same mapping object (the memory blocks in use) for all moments. The
    yielded mapping of memory blocks changes when the caller requests the next moment.
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
    """Return the first moment (pass of a single operation) that needs the most memory."""
    found, most = Peak("nothing", {}, 0), -1
    for moment, (live, total) in zip(moments, live_at(moments), strict=True):
        if total > most:
            most = total
            found = Peak(moment.name, dict(live), moment.temporary)
    return found


def kept(stage: PlacedStage, recompute: Recompute) -> frozenset[str]:
    """Return the names of the tensors that a stage keeps in memory for its backward pass.

    A checkpoint or an input of the stage is kept only if the backward pass or a recomputed
    operation reads it.
    """
    if recompute == "none":
        return stage.saved
    root_of = stage.graph.root_of
    marked = {root_of[o.output.name] for o in stage.operations if o.is_checkpoint}
    candidates = frozenset(marked | stage.incoming)
    if recompute == "norm":
        candidates |= stage.saved - _cheap(stage)
    read, _ = _recomputed(stage, candidates)
    return candidates & read


def _cheap(stage: PlacedStage) -> frozenset[str]:
    """Return the names of the tensors that the recomputation "norm" computes again."""
    root_of = stage.graph.root_of
    kinds: dict[str, set[str]] = {}
    for operation in stage.operations:
        kinds.setdefault(root_of[operation.output.name], set()).add(operation.kind)
    for operation in stage.operations:
        if operation.kind == "elementwise" and operation.inputs:
            source = root_of[operation.inputs[0]]
            kinds[root_of[operation.output.name]] |= kinds.get(source, {"input"}) - {"view"}
    return frozenset(
        root
        for root, of_root in kinds.items()
        if "norm" in of_root and of_root <= {"norm", "elementwise", "view"}
    )


def _recomputed(
    stage: PlacedStage, keeps: frozenset[str]
) -> tuple[frozenset[str], tuple[Operation, ...]]:
    """Return what the backward pass reads, and the operations that are recomputed for it.

    The first returned value contains the names of the tensors that the backward pass or a
    recomputed operation reads. The tensors in ``keeps`` are kept from the forward pass. A stage
    keeps the original values of the tensors that it receives, so operations that change a received
    tensor in place are also recomputed.
    """
    if stage.saved <= keeps:
        return stage.saved, ()
    root_of = stage.graph.root_of
    read = set(stage.saved)
    again = []
    for operation in reversed(stage.operations):
        root = root_of[operation.output.name]
        changes_received = operation.is_in_place and root in stage.incoming
        if root in read and (root not in keeps | stage.incoming or changes_received):
            again.append(operation)
            read |= {root_of[name] for name in operation.inputs}
    return frozenset(read), tuple(reversed(again))


def segments(stage: PlacedStage, keeps: frozenset[str]) -> tuple[Segment, ...]:
    """Divide a stage into segments whose operations are recomputed together.

    A segment ends where the recomputation and the backward pass of later operations need only
    tensors that the stage keeps in memory. Each segment can therefore be recomputed independently
    of the other segments.
    """
    root_of = stage.graph.root_of
    again = frozenset(operation.name for operation in _recomputed(stage, keeps)[1])
    last_read: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        inputs = operation.inputs if operation.name in again else ()
        for name in (*inputs, *operation.saved):
            last_read[root_of[name]] = index
    made: dict[str, int] = {}
    for index, operation in enumerate(stage.operations):
        made.setdefault(root_of[operation.output.name], index)
    # For each operation, the change in the number of open blocks of memory. An open block of memory
    # is not kept, and the recomputation or backward pass of a later operation reads it.
    crossing = [0] * (len(stage.operations) + 1)
    for root, first in made.items():
        if root not in keeps and last_read.get(root, first) > first:
            crossing[first] += 1
            crossing[last_read[root]] -= 1
    # An addition belongs to the segment of its operands. The gradients of the operands are the
    # gradient of the sum, so they need no memory of their own before the operands are recomputed.
    added = [operation.kind == "add" for operation in stage.operations[1:]]
    cuts, open_blocks = [0], 0
    for index, is_added_next in enumerate([*added, False]):
        open_blocks += crossing[index]
        if not open_blocks and not is_added_next:
            cuts.append(index + 1)
    return tuple(
        Segment(part, tuple(operation for operation in part if operation.name in again))
        for begin, end in pairwise(cuts)
        if (part := stage.operations[begin:end])
    )


def forward_moments(stage: PlacedStage) -> list[Moment]:
    """Return the moments (passes of operations) of a stage's forward pass for one micro-batch.

    Tensors that the stage sends to other stages or to the host stay in memory until the end.
    """
    sizes = stage.graph.root_bytes
    moments = [Moment("receive", (), {root: sizes[root] for root in sorted(stage.incoming)})]
    moments += [
        _forward(stage, operation, "forward", frozenset()) for operation in stage.operations
    ]
    return [*moments, Moment("send", tuple(sorted(stage.outgoing)))]


def backward_moments(stage: PlacedStage, keeps: frozenset[str]) -> list[Moment]:
    """Return the moments of a stage's backward pass and recomputation for one micro-batch.

    ``keeps`` contains the tensors that the stage keeps from the forward pass for the backward pass.
    The memory blocks of kept tensors have the same names as in the forward pass, and are live from
    their first use on.
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


def _forward(stage: PlacedStage, operation: Operation, name: str, fresh: frozenset[str]) -> Moment:
    """Return the ``Moment`` that describes an operation's forward pass or recomputation.

    ``fresh`` contains the names of recomputed tensors. A recomputed tensor gets another memory
    block, with another name, than in the forward pass.
    """
    root_of, sizes = stage.graph.root_of, stage.graph.root_bytes
    blocks = [root_of[n] for n in (*operation.inputs, operation.output.name)]
    named = {_block(root, fresh): sizes[root] for root in blocks}
    temporary = _product_bytes(stage, operation, backward=False) + _fetched(stage, operation, 1)
    return Moment(f"{operation.name} ({name})", tuple(named), named, temporary)


def _backward(stage: PlacedStage, operation: Operation, fresh: frozenset[str]) -> Moment:
    """Return the ``Moment`` that describes an operation's backward pass.

    The memory for the gradients of weights counts as ``temporary``.
    """
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
            weights = 0  # The gradient's rows are added directly to the gradient accumulator.
        elif operation.product is not None:
            # The gradient from each part of the matrix product is accumulated before the next part
            # is computed.
            weights //= operation.product.serial
    temporary = (
        weights * BYTES[type_of_gradient]
        + _product_bytes(stage, operation, backward=True)
        + _fetched(stage, operation, 2)
    )
    reads = (_gradient(root_of[operation.output.name]), *saved)
    return Moment(f"{operation.name} (backward)", reads, saved | made, temporary)


def _fetched(stage: PlacedStage, operation: Operation, passes: int) -> int:
    """Return the bytes of weights and accumulators that one pass of an operation fetches.

    An operation fetches weights that are in Streaming Memory or divided among the replicas. The
    backward pass (``passes`` is 2) also fetches accumulators from Streaming Memory.
    """
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


def _product_bytes(stage: PlacedStage, operation: Operation, *, backward: bool) -> int:
    """Return the bytes that an operation's matrix products use within its memory proportion."""
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
    """Return the bytes that the largest matrix product of a pass would use without a limit."""
    each = _shapes(product, batch, has_weights=has_weights, backward=backward)
    return max(working_set(shape, operands, partials, tiles) for shape in each) // product.serial


def shapes(operation: Operation, graph: Graph, *, backward: bool) -> tuple[Product, ...]:
    """Return the matrix products that one pass of an operation computes for a whole micro-batch.

    The forward pass of an operation of the kind "product" has one matrix product. The backward pass
    of the operation has two matrix products, which compute the gradients of the first operand and
    of the second operand. The gradient of a convolution's input is also a convolution, which reads
    each output gradient as often as the forward pass reads each input. A repeated matrix product
    (of an LSTM) is returned once, with its number of repeats.
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
    # All samples share the weights, so one matrix product computes the rows of all samples. If both
    # operands are activations, each sample needs a matrix product with its own operands.
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
    """Return a copy of a matrix product, with ``reads`` computed from the sizes of tensors.

    For a convolution, ``reads`` (how often each input element is read) is usually the number of
    kernel positions.
    """
    if not operation.weights or not operation.inputs:
        return product
    elements = graph.tensors[operation.inputs[0]].elements
    reads = max(1.0, product.rows * product.depth * product.count / max(1, elements))
    return replace(product, reads=reads)


@lru_cache(maxsize=4096)
def working_set(product: Product, operands: Type, partials: Type, tiles: int) -> int:
    """Return the bytes of operands and partial sums on the tiles during a matrix product.

    Each tile computes a block of the matrix product and stores the operands and partial sums of the
    block. The blocks of a matrix product on all tiles have the same shape: rows x depth x columns.
    A block of a matrix product needs the fewest bytes if its three sides (rows, depth and columns)
    are equal. The sides of a block are therefore as equal as the shape of the matrix product
    permits. Neighbouring output positions of a convolution share most of the input that they read.
    In a convolution, the border of the input of one tile's block is about as large as the rest of
    the block's input.
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
