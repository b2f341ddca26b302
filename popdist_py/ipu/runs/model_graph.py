"""The class Captured, which is the forward pass of a model as a graph for the device model.

The module ``capture`` makes objects of this class. The objects do not refer to tensors, so the
library can store them with an executable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["LEAST_PROPORTION", "Captured"]

# PopTorch accepts 0 as the available memory proportion. The device model needs a positive number,
# because it splits an operation into more parts if the proportion is smaller.
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
