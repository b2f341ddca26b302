"""Classes that describe a model's forward pass as data, and its division into stages.

The backward pass is derived from the forward pass. The backward pass runs the operations in reverse
order, and each operation reads the tensors that it saved. For sizes that grow with the batch, the
size of one sample is stored. This module does not depend on an IPU or on the settings of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# The output of a "view" shares the memory of the operation's first input. The backward pass of an
# "add" does not read a saved tensor. The backward pass of an "elementwise" operation reads the
# operation's output.
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
        elements: The number of elements per sample.
        type: The type of the elements.
        is_batched: Whether the size of the tensor grows with the batch. ``is_batched`` is False for
            a loss, for example.
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
    """A parameter, or a buffer that stays on the device (``is_trained`` is False for buffers)."""

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
    """The sizes of a matrix product or a convolution.

    The operation consists of ``count`` products of shape [rows, depth] x [depth, columns]. The rows
    of a convolution are the positions of its output. The depth of a convolution is the number of
    input channels per group times the number of kernel positions. The columns of a convolution are
    the output channels per group, and its count is the number of groups.

    Attributes:
        rows: The number of rows per sample.
        depth: The length of the dimension that the product sums over.
        columns: The number of columns of the second operand.
        count: The number of independent products, such as groups or attention heads.
        serial: The number of parts into which the product is divided (``serializedMatMul``). The
            parts are computed one after the other.
        repeats: The number of repetitions of the product, if each repetition needs the result of
            the repetition before it (the steps of an LSTM). ``rows`` is the number of rows of one
            repetition. The program contains the code of the product once.
        reads: The number of times that each element of the first operand is read, which is above 1
            in convolutions. The module ``tensor_liveness`` computes ``reads`` from the sizes of
            tensors.
        is_convolution: Whether the settings for convolutions apply. For other matrix products,
            ``is_convolution`` is False.
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
        """The number of multiplications and additions for one sample."""
        return 2 * self.rows * self.depth * self.columns * self.count * self.repeats


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the forward pass.

    Attributes:
        name: The unique name of the operation, which starts with the name of its module. An example
            is ``layer1.0.conv1``.
        kind: The kind of the operation, which selects the models of its memory and time.
        inputs: The names of the tensors that the operation reads.
        output: The tensor that the operation computes.
        weights: The names of the weights that the operation reads.
        saved: The names of the inputs and the output that the operation's backward pass reads.
        product: The sizes of the product, for operations of the kind "product"; None for other
            kinds.
        is_in_place: Whether the output is stored in the memory of the first input.
        is_checkpoint: Whether ``recomputationCheckpoint`` keeps the output for the backward pass.
        memory_proportion: The operation's own available memory proportion
            (``set_available_memory``). None means the proportion of the operation's IPU.

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
                f"memory_proportion of {self.name} is {self.memory_proportion}: "
                "it lies above 0 and is at most 1"
            )


def saved_by(
    kind: Kind, inputs: Sequence[str], output: str, *, has_weights: bool
) -> tuple[str, ...]:
    """Return the names of the tensors that the backward pass of an operation usually reads."""
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
        inputs: The tensors that the host sends.
        weights: The parameters and buffers, which stay on the device.
        operations: The operations, in execution order.
        outputs: The names of the tensors that the host gets.
        batch: The number of samples in a micro-batch.

    Raises:
        ValueError: The batch is below 1, two tensors or two weights have the same name, or a tensor
            is read before an operation has computed it.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Weight, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[str, ...]
    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}: a micro-batch has at least one sample")
        known = {tensor.name for tensor in self.inputs}
        weights = {weight.name for weight in self.weights}
        if len(known) + len(weights) < len(self.inputs) + len(self.weights):
            raise ValueError("two inputs or two weights of a graph have the same name")
        for operation in self.operations:
            missing = [name for name in operation.inputs if name not in known]
            missing += [name for name in operation.weights if name not in weights]
            missing += [n for n in operation.saved if n not in known | {operation.output.name}]
            if missing:
                raise ValueError(f"{operation.name} reads {missing[0]}, which nothing makes")
            if operation.output.name in known:
                raise ValueError(f"{operation.output.name} is made twice")
            known.add(operation.output.name)
        if missing := [name for name in self.outputs if name not in known]:
            raise ValueError(f"output {missing[0]} is made by nothing")

    def __getstate__(self) -> dict[str, object]:
        # Only the fields are pickled. The cached properties can be computed again, and they contain
        # mapping proxies, which cannot be pickled.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """All inputs and all outputs of operations, by name."""
        made = {operation.output.name: operation.output for operation in self.operations}
        return MappingProxyType({tensor.name: tensor for tensor in self.inputs} | made)

    @cached_property
    def weight_of(self) -> Mapping[str, Weight]:
        """All weights of the graph, by name."""
        return MappingProxyType({weight.name: weight for weight in self.weights})

    @cached_property
    def first_reader(self) -> Mapping[str, int]:
        """For each weight's name, the number of the first operation that reads the weight."""
        first: dict[str, int] = {}
        for index, operation in enumerate(self.operations):
            for name in operation.weights:
                first.setdefault(name, index)
        return MappingProxyType(first)

    @cached_property
    def root_of(self) -> Mapping[str, str]:
        """For each tensor's name, the name of the tensor's root.

        The root of a tensor is the tensor whose memory it shares, or the tensor itself.
        """
        roots = {tensor.name: tensor.name for tensor in self.inputs}
        for operation in self.operations:
            name = operation.output.name
            shares = operation.inputs and (operation.is_in_place or operation.kind == "view")
            roots[name] = roots[operation.inputs[0]] if shares else name
        return MappingProxyType(roots)

    @cached_property
    def needs_gradient(self) -> frozenset[str]:
        """The names of the tensors that depend on a trained weight and so have a gradient."""
        found: set[str] = set()
        for operation in self.operations:
            trained = any(self.weight_of[name].is_trained for name in operation.weights)
            if trained or any(name in found for name in operation.inputs):
                found.add(operation.output.name)
        return frozenset(found)

    @cached_property
    def gradient_roots(self) -> frozenset[str]:
        """The roots (see ``root_of``) of the tensors that have a gradient."""
        return frozenset(self.root_of[name] for name in self.needs_gradient)

    @cached_property
    def root_bytes(self) -> Mapping[str, int]:
        """For each root's name, the bytes of the largest tensor that is stored in its memory."""
        sizes: dict[str, int] = {}
        for name, root in self.root_of.items():
            sizes[root] = max(sizes.get(root, 0), self.bytes_of(name))
        return MappingProxyType(sizes)

    def bytes_of(self, name: str) -> int:
        """Return the size of a tensor in bytes, for the batch of this graph."""
        return self.tensors[name].bytes(self.batch)

    def with_batch(self, batch: int) -> Graph:
        """Return the same graph with another number of samples per micro-batch."""
        return replace(self, batch=batch)

    def cast(self, *, data: Type | None = None, weights: Type | None = None) -> Graph:
        """Return the same graph with other types of its tensors and weights.

        Args:
            data: The type that replaces float32 and float16 in inputs and outputs of operations.
                None keeps their types.
            weights: The type of all weights. None keeps their types.
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
    """The stage of each operation, and the IPU of each stage.

    Attributes:
        stages: The stage of each operation, in the order of the graph's operations. The numbers of
            the stages never decrease.
        ipus: The IPU of each stage.

    Raises:
        ValueError: The numbers of the stages decrease, a stage lacks operations or an IPU, or the
            number of an IPU is negative.
    """

    stages: tuple[int, ...]
    ipus: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(after < before for before, after in pairwise(self.stages)):
            raise ValueError("stages fall: operations of a stage stand together, in order")
        if set(self.stages) != set(range(len(self.ipus))):
            given = counted(len(self.ipus), "IPU")
            raise ValueError(f"{given} given for stages {sorted(set(self.stages))}")
        if any(ipu < 0 for ipu in self.ipus):
            raise ValueError("IPUs are counted from 0")

    @property
    def num_stages(self) -> int:
        """The number of stages of the forward pass."""
        return len(self.ipus)

    @property
    def num_ipus(self) -> int:
        """The number of IPUs per replica, which is the highest IPU number plus 1."""
        return max(self.ipus) + 1

    def operations_of(self, graph: Graph, stage: int) -> Iterator[Operation]:
        """Yield the operations of a stage, in execution order."""
        return (o for o, s in zip(graph.operations, self.stages, strict=True) if s == stage)

    def weights_of(self, graph: Graph, stage: int) -> tuple[Weight, ...]:
        """Return the weights that are stored with a stage, because it is the first to read them."""
        first, stages = graph.first_reader, self.stages
        return tuple(w for w in graph.weights if w.name in first and stages[first[w.name]] == stage)

    @classmethod
    def cut(cls, graph: Graph, before: Sequence[str] = ()) -> Placement:
        """Return a placement that begins a new stage, on the next IPU, before each named module.

        Raises:
            ValueError: The graph does not contain one of the modules, or the modules are named in
                another order than in the graph.
        """
        stages: list[int] = []
        waiting = list(before)
        for operation in graph.operations:
            if waiting and (operation.name + ".").startswith(waiting[0] + "."):
                waiting.pop(0)
            stages.append(len(before) - len(waiting))
        if waiting:
            raise ValueError(f"no operation of {waiting[0]} where a stage could begin")
        return cls(tuple(stages), tuple(range(len(before) + 1)))


def stages_of(places: Iterable[tuple[int, int]]) -> list[int]:
    """Return the number of the stage of each operation of a forward pass.

    A stage begins where the phase or the IPU changes. Consecutive blocks on one IPU are one stage.

    Args:
        places: The phase and the IPU of each operation, in the order of execution.
    """
    stages: list[int] = []
    before = None
    for place in places:
        stages.append(stages[-1] + (place != before) if stages else 0)
        before = place
    return stages
