"""The memory of an IPU over time, during a micro-batch and during the weight update.

The moments and the live data of each moment come from the walks of the module ``memory``.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.memory import ipu_memory, walks
from popdist_py.ipu.searches import Run
from popdist_py.ipu.tensor_liveness import live_at

__all__ = ["LiveBytes", "curve"]


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The number of bytes that are live on an IPU at one moment.

    Attributes:
        moment: The name of the operation and of its pass, such as ``layer1.0.conv1 (backward)``.
        bytes: The bytes that are live on the whole IPU, including data that is always live.
    """

    moment: str
    bytes: int


def curve(run: Run, number: int) -> tuple[LiveBytes, ...]:
    """Return the live bytes of an IPU at every moment of forward pass, backward pass and update.

    The moments of one stage follow those of the stage before it. The largest value is the memory
    that the IPU needs. All values include the gaps between variables at the peak.
    """
    own = ipu_memory(run.graph, run.placement, run.settings, run.ipu, number, run.estimates)
    found = []
    for fetched, moments in walks(run.graph, run.placement, run.settings, run.ipu, number):
        base = own.always_live + sum(part.bytes for part in fetched)
        found += [
            LiveBytes(moment.name, base + total)
            for moment, (_, total) in zip(moments, live_at(moments), strict=True)
        ]
    return tuple(found)
