"""The memory that a stage of a model needs in forward pass, recomputation and backward pass.

A moment is the forward or backward pass of a single operation. A moment makes (allocates) blocks of
memory and reads blocks of memory. A block of memory is live (in use) from the moment that makes the
block to the last moment that reads the block. Weights and other data that always stay in memory are
not counted. The module ``tensor_liveness`` does not depend on the order of pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Final

from popdist_py.ipu.graph import BYTES, Graph, Operation, Product, Type
from popdist_py.ipu.placed_stage import PlacedStage
from popdist_py.ipu.recomputation import segments

__all__ = [
    "Moment",
    "Peak",
    "backward_moments",
    "forward_moments",
    "live_at",
    "peak",
    "shapes",
    "working_set",
]

# The factor by which the border of a kernel enlarges the part of a convolution's input that a tile
# reads. For example, 5 x 5 output positions of a convolution with a 3 x 3 kernel read 7 x 7 input
# positions, about twice as many.
_BORDER: Final = 2.0


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
    """The moment that needs the most memory.

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


def live_at(moments: Sequence[Moment]) -> Iterator[tuple[Mapping[str, int], int]]:
    """Yield, for each moment, the memory blocks in use and the bytes of all used memory.

    The function yields the same mapping object for all moments, and changes it when the caller
    requests the next moment.
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
    """Return the first moment that needs the most memory."""
    totals = [total for _, total in live_at(moments)]
    if not totals:
        return Peak("nothing", {}, 0)
    # The blocks are copied for one moment only: in a stage that keeps its tensors, almost every
    # moment of the forward pass needs more memory than all earlier moments.
    index = totals.index(max(totals))
    live, _ = next(islice(live_at(moments), index, None))
    return Peak(moments[index].name, dict(live), moments[index].temporary)


def forward_moments(stage: PlacedStage) -> list[Moment]:
    """Return the moments of a stage's forward pass for one micro-batch.

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
    found = segments(stage, keeps)
    fresh = frozenset(root_of[o.output.name] for segment in found for o in segment.again) - keeps
    for segment in reversed(found):
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

    An operation fetches weights that are in Streaming Memory, divided among the replicas, or stored
    on another IPU. The backward pass (``passes`` is 2) also fetches accumulators from Streaming
    Memory.
    """
    settings, total = stage.settings, 0
    if not stage.fetches or not operation.weights:
        return 0
    for name in operation.weights:
        weight = stage.graph.weight_of[name]
        where = settings.weight_location
        sharded = where.part(weight.elements, settings.replicas) < weight.elements
        if where.is_off_chip(weight.elements) or sharded or name not in stage.stored:
            total += weight.bytes
        where = settings.accumulator_location
        is_added = passes == 2 and weight.is_trained and settings.has_accumulators
        if is_added and where.is_off_chip(weight.elements) and name in stage.stored:
            part = where.part(weight.elements, settings.replicas)
            total += part * BYTES[settings.optimizer.accumulator]
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


@lru_cache(maxsize=4096)
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
    return _read_from(product, graph.tensors[operation.inputs[0]].elements)


@lru_cache(maxsize=4096)
def _read_from(product: Product, elements: int) -> Product:
    reads = max(1.0, product.rows * product.depth * product.count / max(1, elements))
    return replace(product, reads=reads)


@lru_cache(maxsize=4096)
def working_set(product: Product, operands: Type, partials: Type, tiles: int) -> int:
    """Return the bytes of operands and partial sums on the tiles during a matrix product.

    Each tile computes a block of the matrix product and stores the operands and partial sums of the
    block. The blocks on all tiles have the same shape: rows x depth x columns. A block needs the
    fewest bytes if its three sides are equal. The sides are therefore as equal as the shape of the
    matrix product permits. Neighbouring output positions of a convolution share most of the input
    that they read. In a convolution, the border of the input of one tile's block is about as large
    as the rest of the block's input.
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
