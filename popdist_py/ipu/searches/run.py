"""The class ``Run``: all values that determine the memory and the clock cycles of a run.

The searches for a suitable configuration are in the other modules of the package ``searches``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from popdist_py.ipu.cycles import cycles
from popdist_py.ipu.graph import Graph, Placement
from popdist_py.ipu.memory import ESTIMATES, Estimates, memory
from popdist_py.ipu.memory_contents import UNCERTAINTY, IpuMemory
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import IPU
from popdist_py.ipu.stage_cycles import CYCLE_MODEL, CycleModel

__all__ = ["LIMITS", "Run"]

# The shares of a tile's memory that a search allows. A search first looks for configurations that
# certainly fit, and only then for configurations that may fit.
LIMITS: Final = (1 - UNCERTAINTY, 1 + UNCERTAINTY)


@dataclass(frozen=True, slots=True)
class Run:
    """The configuration of a run: all values that determine its memory and clock cycles."""

    graph: Graph
    placement: Placement
    settings: Settings
    ipu: IPU
    estimates: Estimates = ESTIMATES
    model: CycleModel = CYCLE_MODEL

    @property
    def fits(self) -> bool:
        """Whether the model fits into the memory of every IPU with this configuration."""
        return memory(self.graph, self.placement, self.settings, self.ipu, self.estimates).fits

    @property
    def fullest(self) -> IpuMemory:
        """The data and code in the memory of the IPU that contains the fullest tile."""
        report = memory(self.graph, self.placement, self.settings, self.ipu, self.estimates)
        return report.fullest

    @property
    def throughput(self) -> float:
        """The number of samples that all replicas together process per second."""
        return cycles(self.graph, self.placement, self.settings, self.ipu, self.model).throughput

    @property
    def cycles(self) -> int:
        """The number of clock cycles that one call of the model takes."""
        return cycles(self.graph, self.placement, self.settings, self.ipu, self.model).total
