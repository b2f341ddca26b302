"""A forward as data: tensors, weights and operations with their sizes, and where each stands.

The backward follows from the forward: operations in reverse, each reading what it saved. Sizes that
grow with the batch are those of one sample.
Nothing here knows an IPU or the settings of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
]

Type: TypeAlias = Literal["float32", "float16", "int32", "int16", "int8", "uint8", "bool"]
# A view shares the memory of its first input, as does what changes its input in place; "add" and
# "elementwise" differ in what the backward reads: nothing, and the result.
Kind: TypeAlias = Literal[
    "product", "norm", "elementwise", "add", "pool", "lookup", "view", "softmax", "loss"
]

BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "float16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a micro-batch makes.

    Attributes:
        name: another one for each tensor of a graph.
        elements: number of elements of one sample.
        type: of its elements.
        is_batched: False where its size does not grow with the batch (a loss).
    """

    name: str
    elements: int
    type: Type = "float16"
    is_batched: bool = True

    def bytes(self, batch: int) -> int:
        """Return its bytes in a micro-batch of ``batch`` samples."""
        return self.elements * BYTES[self.type] * (batch if self.is_batched else 1)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, or a buffer that stays on the device (``is_trained`` False)."""

    name: str
    elements: int
    type: Type = "float16"
    is_trained: bool = True

    @property
    def bytes(self) -> int:
        """Its bytes."""
        return self.elements * BYTES[self.type]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product or convolution: ``count`` times [rows, depth] x [depth, columns].

    A convolution has the positions of its output as rows, input channels a group times the
    positions of the kernel as depth, output channels a group as columns, and its groups as count.

    Attributes:
        rows: of one sample.
        depth: summed over.
        columns: of the second operand.
        count: independent products (groups, heads).
        serial: parts that it is done in, one after the other (``serializedMatMul``).
        repeats: times that it is done, each needing the last result (steps of an LSTM); rows are
            those of one time. The code is there once.
        reads: how often each element of the first operand is read, above 1 in convolutions; the
            model looks it up where it counts.
        is_convolution: whether the settings of convolutions apply, or those of matrix products.
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
        """Multiplications and additions of one sample."""
        return 2 * self.rows * self.depth * self.columns * self.count * self.repeats


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the forward.

    Attributes:
        name: another one for each operation, starting with the module's: ``layer1.0.conv1``.
        kind: which memory and time model applies.
        inputs: names of tensors that it reads.
        output: what it makes.
        weights: names of weights that it reads.
        saved: names of tensors among inputs and output that its backward reads.
        product: sizes; of the kind "product" only.
        is_in_place: whether the output takes the memory of the first input.
        is_checkpoint: whether ``recomputationCheckpoint`` keeps its output.
        memory_proportion: its own available memory proportion (``set_available_memory``); None
            for that of its IPU.

    Raises:
        ValueError: the proportion is not above 0, or above 1.
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
    """Return what the backward of an operation usually reads."""
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
    """The forward of one micro-batch, operations in the order in which they run.

    Attributes:
        inputs: what the host sends.
        weights: what stays on the device.
        operations: what runs.
        outputs: names of the tensors that the host gets.
        batch: samples of a micro-batch.

    Raises:
        ValueError: a name is used twice, or is used before anything makes it.
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
        # What follows from the fields need not be stored, and mapping proxies cannot be.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name."""
        made = {operation.output.name: operation.output for operation in self.operations}
        return MappingProxyType({tensor.name: tensor for tensor in self.inputs} | made)

    @cached_property
    def weight_of(self) -> Mapping[str, Weight]:
        """All weights by name."""
        return MappingProxyType({weight.name: weight for weight in self.weights})

    @cached_property
    def first_reader(self) -> Mapping[str, int]:
        """By the name of each weight that is read, the number of the first operation to do so."""
        first: dict[str, int] = {}
        for index, operation in enumerate(self.operations):
            for name in operation.weights:
                first.setdefault(name, index)
        return MappingProxyType(first)

    @cached_property
    def root_of(self) -> Mapping[str, str]:
        """By the name of each tensor, that of the tensor whose memory it lies in."""
        roots = {tensor.name: tensor.name for tensor in self.inputs}
        for operation in self.operations:
            name = operation.output.name
            shares = operation.inputs and (operation.is_in_place or operation.kind == "view")
            roots[name] = roots[operation.inputs[0]] if shares else name
        return MappingProxyType(roots)

    @cached_property
    def needs_gradient(self) -> frozenset[str]:
        """The tensors that have a gradient: those that depend on a trained weight."""
        found: set[str] = set()
        for operation in self.operations:
            trained = any(self.weight_of[name].is_trained for name in operation.weights)
            if trained or any(name in found for name in operation.inputs):
                found.add(operation.output.name)
        return frozenset(found)

    @cached_property
    def gradient_roots(self) -> frozenset[str]:
        """Where the tensors that have a gradient lie."""
        return frozenset(self.root_of[name] for name in self.needs_gradient)

    @cached_property
    def root_bytes(self) -> Mapping[str, int]:
        """By the name of each root, the bytes of the largest tensor that lies there."""
        sizes: dict[str, int] = {}
        for name, root in self.root_of.items():
            sizes[root] = max(sizes.get(root, 0), self.bytes_of(name))
        return MappingProxyType(sizes)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self.tensors[name].bytes(self.batch)

    def with_batch(self, batch: int) -> Graph:
        """Return the same forward of another micro-batch."""
        return replace(self, batch=batch)

    def cast(self, *, data: Type | None = None, weights: Type | None = None) -> Graph:
        """Return the same forward with other types in place of float32 and float16."""

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
    """Which stage each operation is in, and which IPU each stage is on.

    Attributes:
        stages: stage of each operation, in the order of the graph; they never fall.
        ipus: IPU of each stage.

    Raises:
        ValueError: stages fall or leave one out, or an IPU is negative.
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
        """Number of stages of the forward."""
        return len(self.ipus)

    @property
    def num_ipus(self) -> int:
        """Number of IPUs of a replica: the largest id and one, as PopTorch counts."""
        return max(self.ipus) + 1

    def operations_of(self, graph: Graph, stage: int) -> Iterator[Operation]:
        """Yield the operations of a stage."""
        return (o for o, s in zip(graph.operations, self.stages, strict=True) if s == stage)

    def weights_of(self, graph: Graph, stage: int) -> tuple[Weight, ...]:
        """Return the weights that lie with a stage: the first that reads them."""
        first, stages = graph.first_reader, self.stages
        return tuple(w for w in graph.weights if w.name in first and stages[first[w.name]] == stage)

    @classmethod
    def cut(cls, graph: Graph, before: Sequence[str] = ()) -> Placement:
        """Return a placement that begins a stage, on the next IPU, before each named module.

        Raises:
            ValueError: no operation is called so, or the order is another one.
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
