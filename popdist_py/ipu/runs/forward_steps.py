"""The intermediate representation between torch's operations and the graph for an IPU.

A forward pass is a list of steps. Each step is an operation that computes one new value (a tensor
or a number) and does not change other values. The package ``poptorch.on_ipu`` makes the steps from
torch's operations. The module ``graph_of_steps`` converts the steps to a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.ipu.graph import Kind, Product, Type, Weight

__all__ = ["Forward", "Step", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """The size and type of an input, or of the result of an operation, in a forward pass.

    Attributes:
        elements: The number of elements, of all samples of the micro-batch together.
        type: The data type of the elements, such as "float16".
        is_batched: Whether each element belongs to one sample of the micro-batch, so that the
            number of elements grows with the number of samples.
    """

    elements: int
    type: Type
    is_batched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An operation of a forward pass that computes one new value, such as a tensor.

    Attributes:
        operator: The name of the operation in torch.
        module: The path of the submodule that calls the operation.
        kind: The kind of the operation on the IPU, such as "norm".
        inputs: For each value that the operation reads, the key of the value in ``Forward.values``.
        output: The key in ``Forward.values`` of the value that the operation computes.
        weights: The names of the weights that the operation reads.
        saves: A word (such as "inputs") that says which tensors the backward pass of the operation
            reads. The type ``on_ipu.operation_rules.Saves`` explains the words that ``saves`` may
            contain.
        product: The sizes of the matrices, if the operation is a matrix product or a convolution;
            None for other operations.
        place: The number of the execution phase and the number of the IPU of the operation.
        is_checkpoint: Whether the operation only marks its input as a recomputation checkpoint. The
            mark has an effect only if another operation reads the output of the marking operation.
            The module ``graph_of_steps`` removes operations that only mark their input, and then
            sets ``is_checkpoint`` of the operations that compute the marked values.
        memory_proportion: The share of the IPU's memory that the user's program allows the
            operation to use for temporary data; None if the program does not set a share.
    """

    operator: str
    module: str
    kind: Kind
    inputs: tuple[int, ...]
    output: int
    weights: tuple[str, ...] = ()
    saves: str = "nothing"
    product: Product | None = None
    place: tuple[int, int] = (0, 0)
    is_checkpoint: bool = False
    memory_proportion: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """The forward pass of one micro-batch, as a list of steps.

    Attributes:
        inputs: The name of each input that the host sends to the IPUs, and the key of the input in
            ``values``.
        values: A mapping from the number of each input or operation's result to its size and type.
        weights: A mapping from the name of each parameter, buffer or constant to its size and type.
        steps: The operations of the forward pass as ``Step`` objects, in execution order.
        outputs: The keys in ``values`` of the outputs, which the IPUs send to the host.
        batch: The number of samples of the micro-batch.
    """

    inputs: tuple[tuple[str, int], ...]
    values: Mapping[int, Value]
    weights: Mapping[str, Weight]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    batch: int
