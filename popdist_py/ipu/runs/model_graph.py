"""The class ``ModelGraph``: the operations of a model's forward pass, with their IPUs.

A ``ModelGraph`` does not contain torch tensors, so PopTorch can store it in the file of a compiled
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["LEAST_PROPORTION", "ModelGraph"]

# The smallest available memory proportion that is used to estimate memory and time. With a smaller
# available memory proportion, a matrix product is divided into more parts. PopTorch also accepts
# the available memory proportion 0, but the number of the matrix product's parts would be infinite.
LEAST_PROPORTION: Final = 0.01


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The forward pass of a model for one micro-batch, as a graph of operations.

    Attributes:
        graph: The operations of the forward pass with their sizes, and the weights that the
            operations read.
        placement: The pipeline stage or execution phase of each operation, and the IPU of each
            stage.
    """

    graph: Graph
    placement: Placement
