"""The class Captured, which is the forward pass of a model as a graph for the device model.

The module ``capture`` makes these objects. They do not refer to tensors, so they can be stored with
an executable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["LEAST_PROPORTION", "Captured"]

# PopTorch accepts 0 as the available memory proportion. The model of the device needs a positive
# share, because it computes from it into how many parts an operation is split.
LEAST_PROPORTION: Final = 0.01


@dataclass(frozen=True, slots=True)
class Captured:
    """The forward pass of one micro-batch.

    Attributes:
        graph: The operations with their sizes, and the weights that the operations read.
        placement: The stage or phase of each operation, and the IPU of each stage.
    """

    graph: Graph
    placement: Placement
