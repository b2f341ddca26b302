"""A forward between torch and the device: steps that each make one value and change none.

Nothing here knows torch: it is what reading the observations makes, and tidying changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from popdist_py.ipu.graph import Kind, Product, Type, Weight

__all__ = ["Forward", "Step", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """What a step makes or the host sends.

    Attributes:
        elements: those of all samples of the micro-batch.
        type: of its elements.
        is_batched: whether they belong to samples.
    """

    elements: int
    type: Type
    is_batched: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation.

    Attributes:
        operator: torch's name of it.
        module: path of the submodule.
        kind: what it is to the device.
        inputs: numbers of the values that it reads.
        output: number of the value that it makes.
        weights: names of those that it reads.
        saves: what its backward reads: one of ``operation_rules.Saves``.
        product: sizes, of products only.
        place: phase and IPU.
        is_checkpoint: whether its value is to be kept.
        memory_proportion: its own available memory proportion, if it has one.
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
    """One forward of one micro-batch.

    Attributes:
        inputs: name and number of each value that the host sends.
        values: all values by number.
        weights: parameters, buffers and constants by name.
        steps: in order.
        outputs: numbers of the values that the host gets.
        batch: samples of the micro-batch.
    """

    inputs: tuple[tuple[str, int], ...]
    values: Mapping[int, Value]
    weights: Mapping[str, Weight]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    batch: int
