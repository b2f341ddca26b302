"""The intermediate representation between torch's operations and the graph for the device.

A forward pass is a list of steps. Each step computes one new value and does not change other
values. The package ``poptorch.on_ipu`` makes the steps from torch's operations. The module
``graph_of_steps`` converts the steps to a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.ipu.graph import Kind, Product, Type, Weight

__all__ = ["Forward", "Step", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A result of a step, or an input that the host sends.

    Attributes:
        elements: The number of elements of all samples of the micro-batch together.
        type: The type of the elements.
        is_batched: Whether each element belongs to one sample of the micro-batch.
    """

    elements: int
    type: Type
    is_batched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation of a forward pass.

    Attributes:
        operator: The name of the operation in torch.
        module: The path of the submodule that calls the operation.
        kind: The kind of the operation on the device.
        inputs: The numbers of the values that the operation reads.
        output: The number of the value that the operation computes.
        weights: The names of the weights that the operation reads.
        saves: The values that the backward pass of the operation reads, as one of the values
            of ``on_ipu.operation_rules.Saves``.
        product: The sizes of the factors, only for matrix products and convolutions.
        place: The phase and the IPU that run the operation.
        is_checkpoint: Whether the output is kept as a recomputation checkpoint.
        memory_proportion: The share of the IPU's memory that the program allows this operation to
            use for temporary data, or None if the program does not set a share.
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
    """The forward pass of one micro-batch.

    Attributes:
        inputs: The name and the number of each value that the host sends.
        values: A mapping from the number of each value to the value.
        weights: A mapping from the name of each parameter, buffer or constant to its description.
        steps: The operations in the order of their execution.
        outputs: The numbers of the values that the host receives.
        batch: The number of samples of the micro-batch.
    """

    inputs: tuple[tuple[str, int], ...]
    values: Mapping[int, Value]
    weights: Mapping[str, Weight]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    batch: int
