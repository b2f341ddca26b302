"""The class ModelGraph, which is the forward pass of a model as a graph for the device model.

Objects of this class do not refer to tensors, so PopTorch can store them with an executable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["LEAST_PROPORTION", "ModelGraph"]

# PopTorch accepts 0 as the available memory proportion. The device model needs a positive number,
# because it splits an operation into more parts if the proportion is smaller.
LEAST_PROPORTION: Final = 0.01


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The forward pass of one micro-batch.

    Attributes:
        graph: The operations with their sizes, and the weights that the operations read.
        placement: The stage or phase of each operation, and the IPU of each stage.
    """

    graph: Graph
    placement: Placement
