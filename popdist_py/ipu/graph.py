"""Classes for the operations of a model's forward pass, and its division into stages.

A graph does not contain the backward pass, which is derived from the forward pass. The backward
pass runs the operations in reverse order, and reads the tensors that their forward passes saved. If
the size of a tensor grows with the number of samples, a graph stores the size for one sample. The
module ``graph`` does not depend on a type of IPU or on the options of a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from popdist_py.errors import counted

__all__ = [
    "BYTES",
    "Graph",
    "Kind",
    "Operation",
    "Placement",
    "Product",
    "Tensor",
    "Type",
    "Weight",
    "saved_by",
    "stages_of",
]

Type: TypeAlias = Literal["float32", "float16", "int32", "int16", "int8", "uint8", "bool"]
# The output of an operation of the kind "view" shares the memory of the operation's first input.
# The backward pass of an addition ("add") does not read a saved tensor. The backward pass of an
# "elementwise" operation reads the operation's output.
Kind: TypeAlias = Literal[
    "product", "norm", "elementwise", "add", "pool", "lookup", "view", "softmax", "loss"
]

BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "float16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an activation of the forward pass.

    Attributes:
        name: The name of the tensor, which is unique in the graph.
        elements: The number of elements of the tensor for one sample.
        type: The data type of the elements, such as "float16".
        is_batched: Whether the size of the tensor grows with the number of samples. For example,
            ``is_batched`` is False for a loss, which is one number for all samples.
    """

    name: str
    elements: int
    type: Type = "float16"
    is_batched: bool = True

    def bytes(self, batch: int) -> int:
        """Return the size of the tensor in bytes, for a micro-batch of ``batch`` samples."""
        return self.elements * BYTES[self.type] * (batch if self.is_batched else 1)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of the model; for a buffer, ``is_trained`` is False."""

    name: str
    elements: int
    type: Type = "float16"
    is_trained: bool = True

    @property
    def bytes(self) -> int:
        """The size of the weight in bytes."""
        return self.elements * BYTES[self.type]


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a matrix product, or of a convolution computed as a matrix product.

    The operation consists of ``count`` matrix products of shape [rows, depth] x [depth, columns]. A
    convolution is represented as a matrix product of equal size: ``rows`` is the number of
    positions of its output, ``depth`` is the number of input channels per group times the number of
    kernel positions, ``columns`` is the number of output channels per group, and ``count`` is the
    number of groups.

    Attributes:
        rows: The number of rows of the first matrix for one sample.
        depth: The length of the dimension that the matrix product sums over.
        columns: The number of columns of the second matrix of the matrix product.
        count: The number of independent matrix products, such as the number of attention heads or
            of a convolution's groups.
        serial: The number of parts into which ``serializedMatMul`` divides the matrix product. The
            IPU computes the parts of the matrix product one after the other.
        repeats: The number of times that the matrix product is repeated, where each repetition
            needs the previous result (as the time steps of an LSTM do). If the matrix product is
            repeated, ``rows`` is the number of rows in one repetition of the product. The code of a
            repeated matrix product is counted once.
        reads: The number of times that the matrix product reads each element of its first operand.
            ``reads`` is above 1 in convolutions whose kernels have several positions. The module
            ``tensor_liveness`` computes ``reads`` from the sizes of tensors.
        is_convolution: Whether PopTorch's options for convolutions apply to the operation. For
            other matrix products, ``is_convolution`` is False.
    """

    rows: int
    depth: int
    columns: int
    count: int = 1
    serial: int = 1
    repeats: int = 1
    reads: float = 1.0
    is_convolution: bool = False

    @property
    def flops(self) -> int:
        """The number of multiplications and additions of the matrix product for one sample."""
        return 2 * self.rows * self.depth * self.columns * self.count * self.repeats


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a model's forward pass.

    Attributes:
        name: The unique name of the operation, which starts with the path of its submodule. An
            example of an operation's name is ``layer1.0.conv1``.
        kind: The kind of the operation, such as "norm" (a normalisation). The kind selects the
            formulas for the operation's memory and time.
        inputs: The names of the tensors that the operation reads.
        output: The tensor that the operation computes.
        weights: The names of the weights that the operation reads.
        saved: The names of the inputs and the output that the operation's backward pass reads.
        product: The sizes of the matrix product, for operations of the kind "product"; None for
            other kinds of operations.
        is_in_place: Whether the output of the operation is stored in the memory of its first input.
        is_checkpoint: Whether ``poptorch.recomputationCheckpoint`` keeps the output of the
            operation for the backward pass.
        memory_proportion: The available memory proportion that ``poptorch.set_available_memory``
            sets for this operation. If ``memory_proportion`` is None, the operation uses the
            available memory proportion of its IPU.

    Raises:
        ValueError: ``memory_proportion`` is 0 or less, or above 1.
    """

    name: str
    kind: Kind
    inputs: tuple[str, ...]
    output: Tensor
    weights: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    product: Product | None = None
    is_in_place: bool = False
    is_checkpoint: bool = False
    memory_proportion: float | None = None

    def __post_init__(self) -> None:
        if self.memory_proportion is not None and not 0 < self.memory_proportion <= 1:
            raise ValueError(
                f"memory_proportion of the operation {self.name} is {self.memory_proportion}: "
                "expected a number above 0 and at most 1"
            )


def saved_by(
    kind: Kind, inputs: Sequence[str], output: str, *, has_weights: bool
) -> tuple[str, ...]:
    """Return the names of the tensors that an operation's backward pass reads by default."""
    if kind in ("view", "add"):
        return ()
    if kind == "product":
        return tuple(inputs[:1] if has_weights else inputs)
    if kind in ("norm", "loss", "lookup"):
        return tuple(inputs)
    if kind == "pool":
        return (inputs[0], output)
    return (output,)


@dataclass(frozen=True)
class Graph:
    """The forward pass of one micro-batch.

    Attributes:
        inputs: The input tensors of the forward pass, which the host sends to the IPUs.
        weights: The model's parameters and buffers.
        operations: The operations of the forward pass, in execution order.
        outputs: The names of the output tensors, which the IPUs send to the host.
        batch: The number of samples in a micro-batch.

    Raises:
        ValueError: The number of samples is below 1, two tensors or two weights have the same name,
            or an operation reads a tensor that no earlier operation has computed.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Weight, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[str, ...]
    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(
                f"batch is {self.batch}: expected the number of samples of a micro-batch, 1 or more"
            )
        known = {tensor.name for tensor in self.inputs}
        weights = {weight.name for weight in self.weights}
        if len(known) + len(weights) < len(self.inputs) + len(self.weights):
            raise ValueError(
                "two inputs or two weights of the graph have the same name: give each a unique name"
            )
        for operation in self.operations:
            missing = [name for name in operation.inputs if name not in known]
            missing += [name for name in operation.weights if name not in weights]
            own = operation.output.name
            missing += [name for name in operation.saved if name not in known and name != own]
            if missing:
                raise ValueError(
                    f"the operation {operation.name} reads {missing[0]}, but no input, weight or "
                    "earlier operation of the graph has this name"
                )
            if own in known:
                raise ValueError(
                    f"two tensors of the graph have the name {own}: give each a unique name"
                )
            known.add(own)
        if missing := [name for name in self.outputs if name not in known]:
            raise ValueError(f"no operation of the graph computes the graph's output {missing[0]}")

    def __getstate__(self) -> dict[str, object]:
        # Only the dataclass fields of a ``Graph`` are pickled. The cached properties of a ``Graph``
        # contain mapping proxies, which cannot be pickled. The unpickled ``Graph`` computes its
        # cached properties again.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """A mapping from the name of each input and each operation's output to its tensor."""
        made = {operation.output.name: operation.output for operation in self.operations}
        return MappingProxyType({tensor.name: tensor for tensor in self.inputs} | made)

    @cached_property
    def weight_of(self) -> Mapping[str, Weight]:
        """A mapping from the name of each parameter and buffer to its ``Weight``."""
        return MappingProxyType({weight.name: weight for weight in self.weights})

    @cached_property
    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """A mapping from each tensor's name to the numbers of the operations that read it.

        The mapping does not contain tensors that no operation reads. The numbers are sorted.
        """
        found: dict[str, list[int]] = {}
        for index, operation in enumerate(self.operations):
            for name in set(operation.inputs):
                found.setdefault(name, []).append(index)
        return MappingProxyType({name: tuple(indexes) for name, indexes in found.items()})

    @cached_property
    def first_reader(self) -> Mapping[str, int]:
        """A mapping from each weight's name to the number of the first operation that reads it."""
        first: dict[str, int] = {}
        for index, operation in enumerate(self.operations):
            for name in operation.weights:
                first.setdefault(name, index)
        return MappingProxyType(first)

    @cached_property
    def weights_by_reader(self) -> tuple[tuple[int, int], ...]:
        """The weights that operations read, sorted by the first operation that reads each of them.

        Each pair contains the number of the first operation that reads a weight, and the index of
        this weight in ``weights``.
        """
        first = self.first_reader
        numbered = enumerate(self.weights)
        return tuple(sorted((first[w.name], i) for i, w in numbered if w.name in first))

    @cached_property
    def root_of(self) -> Mapping[str, str]:
        """A mapping from the name of each tensor to the name of the tensor that owns its memory.

        The tensor that owns the memory is called the root. The root of a view or of an in-place
        result is the tensor whose memory the view or result shares. A tensor that does not share
        another tensor's memory is its own root.
        """
        roots = {tensor.name: tensor.name for tensor in self.inputs}
        for operation in self.operations:
            name = operation.output.name
            shares = operation.inputs and (operation.is_in_place or operation.kind == "view")
            roots[name] = roots[operation.inputs[0]] if shares else name
        return MappingProxyType(roots)

    @cached_property
    def needs_gradient(self) -> frozenset[str]:
        """The names of the tensors that depend on a trained weight, and thus have a gradient."""
        found: set[str] = set()
        for operation in self.operations:
            trained = any(self.weight_of[name].is_trained for name in operation.weights)
            if trained or any(name in found for name in operation.inputs):
                found.add(operation.output.name)
        return frozenset(found)

    @cached_property
    def gradient_roots(self) -> frozenset[str]:
        """For all tensors that have a gradient, the names of the tensors that own their memory."""
        return frozenset(self.root_of[name] for name in self.needs_gradient)

    @cached_property
    def root_bytes(self) -> Mapping[str, int]:
        """A mapping from the name of each root (a tensor that owns memory) to its size in bytes.

        The given size is the size of the largest tensor that is stored in the root's memory.
        """
        sizes: dict[str, int] = {}
        for name, root in self.root_of.items():
            sizes[root] = max(sizes.get(root, 0), self.bytes_of(name))
        return MappingProxyType(sizes)

    def bytes_of(self, name: str) -> int:
        """Return the size of a tensor in bytes, for the number of samples of this graph."""
        return self.tensors[name].bytes(self.batch)

    def with_batch(self, batch: int) -> Graph:
        """Return a copy of the graph, with another number of samples per micro-batch."""
        return replace(self, batch=batch)

    def cast(self, *, data: Type | None = None, weights: Type | None = None) -> Graph:
        """Return a copy of the graph, with other element types of its tensors and weights.

        Args:
            data: The element type that replaces float32 and float16 in inputs and outputs of
                operations. If ``data`` is None, the types of inputs and outputs do not change.
            weights: The new element type of all weights. If ``weights`` is None, the types of the
                weights do not change.
        """

        def of_data(tensor: Tensor) -> Tensor:
            if data is None or tensor.type not in ("float32", "float16"):
                return tensor
            return replace(tensor, type=data)

        return replace(
            self,
            inputs=tuple(map(of_data, self.inputs)),
            operations=tuple(replace(o, output=of_data(o.output)) for o in self.operations),
            weights=tuple(replace(w, type=weights or w.type) for w in self.weights),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The stage (part of the model on one IPU) of each operation, and the IPU of each stage.

    Attributes:
        stages: The number of the stage of each operation, in execution order. The stage numbers
            never decrease from one operation to the next.
        ipus: The number of the IPU that runs each stage.

    Raises:
        ValueError: The stage numbers decrease from one operation to the next, a stage has no
            operation or no IPU, or the number of an IPU is negative.
    """

    stages: tuple[int, ...]
    ipus: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(after < before for before, after in pairwise(self.stages)):
            raise ValueError(
                "the stage number of an operation is lower than that of the operation before: "
                "expected stage numbers that never decrease"
            )
        if set(self.stages) != set(range(len(self.ipus))):
            given = counted(len(self.ipus), "IPU")
            raise ValueError(
                f"{given} given for the stages {sorted(set(self.stages))}: expected one IPU for "
                "each stage, and stages that are numbered from 0"
            )
        if any(ipu < 0 for ipu in self.ipus):
            raise ValueError(
                f"an IPU has the number {min(self.ipus)}: expected IPU numbers from 0 on"
            )

    @property
    def num_stages(self) -> int:
        """The number of stages into which the forward pass is divided."""
        return len(self.ipus)

    @property
    def num_ipus(self) -> int:
        """The number of IPUs per replica, which is the highest number of an IPU plus 1."""
        return max(self.ipus) + 1

    def operations_of(self, graph: Graph, stage: int) -> tuple[Operation, ...]:
        """Return the operations of one stage of the graph, in execution order."""
        first, end = self.ends_of(stage)
        return graph.operations[first:end]

    def weights_of(self, graph: Graph, stage: int) -> tuple[Weight, ...]:
        """Return the weights that a stage's IPU stores, because no earlier stage reads them."""
        first, end = self.ends_of(stage)
        ordered = graph.weights_by_reader
        own = ordered[bisect_left(ordered, (first, -1)) : bisect_left(ordered, (end, -1))]
        return tuple(graph.weights[position] for position in sorted(i for _, i in own))

    def ends_of(self, stage: int) -> tuple[int, int]:
        """Return the numbers of a stage's first operation and of the operation after the stage."""
        return bisect_left(self.stages, stage), bisect_right(self.stages, stage)

    @classmethod
    def cut(cls, graph: Graph, before: Sequence[str] = ()) -> Placement:
        """Return a placement that begins a new stage, on the next IPU, before each given submodule.

        The argument ``before`` contains the names of the submodules that begin a new stage.

        Raises:
            ValueError: The graph does not contain one of the submodules, or ``before`` gives the
                submodules in another order than the graph.
        """
        stages: list[int] = []
        waiting = list(before)
        for operation in graph.operations:
            if waiting and (operation.name + ".").startswith(waiting[0] + "."):
                waiting.pop(0)
            stages.append(len(before) - len(waiting))
        if waiting:
            raise ValueError(
                f"no stage can begin with the submodule {waiting[0]}: expected submodules of the "
                "graph, in execution order"
            )
        return cls(tuple(stages), tuple(range(len(before) + 1)))


def stages_of(places: Iterable[tuple[int, int]]) -> list[int]:
    """Return the stage number of each operation of a forward pass.

    A stage begins where the execution phase or the IPU of the operations changes. Consecutive
    blocks (groups of operations) of the same phase and IPU are one stage.

    Args:
        places: For each operation in execution order, the number of its execution phase and the
            number of its IPU.
    """
    stages: list[int] = []
    before = None
    for place in places:
        stages.append(stages[-1] + (place != before) if stages else 0)
        before = place
    return stages
