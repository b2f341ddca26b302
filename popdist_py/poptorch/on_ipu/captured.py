"""One forward as the model of the device sees it: what capturing makes and all else reads.

Nothing here refers to tensors: it can be stored with an executable.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.graph import Graph, Placement

__all__ = ["Captured"]


@dataclass(frozen=True, slots=True)
class Captured:
    """One forward of one micro-batch.

    Attributes:
        graph: its operations, with their sizes, and the weights they read.
        placement: the stage (or phase) of each operation, and the IPU of each stage.
    """

    graph: Graph
    placement: Placement
