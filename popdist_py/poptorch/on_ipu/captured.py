"""One forward as the model of the device sees it: what capturing makes and all else reads.

Nothing here refers to tensors: it can be stored with an executable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["LEAST_PROPORTION", "Captured"]

# PopTorch takes a share of 0 of the memory; an operation still has to be done in some number of
# parts.
LEAST_PROPORTION: Final = 0.01


@dataclass(frozen=True, slots=True)
class Captured:
    """One forward of one micro-batch.

    Attributes:
        graph: its operations, with their sizes, and the weights they read.
        placement: the stage (or phase) of each operation, and the IPU of each stage.
    """

    graph: Graph
    placement: Placement
