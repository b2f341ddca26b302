"""The used memory of an IPU over time, during a micro-batch and during the weight update.

The function ``walks`` of the module ``memory`` provides the moments (passes of single operations)
and the data in memory at each moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.memory import ipu_memory, walks
from popdist_py.ipu.searches import Run
from popdist_py.ipu.tensor_liveness import live_at

__all__ = ["LiveBytes", "curve"]


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The number of used bytes in the memory of an IPU at one moment.

    Attributes:
        moment: The name of the operation that runs at this time, and whether its forward or
            backward pass runs, for example ``layer1.0.conv1 (backward)``.
        bytes: The used bytes on all tiles of the IPU together. ``bytes`` includes weights and other
            data that always stays in memory.
    """

    moment: str
    bytes: int


def curve(run: Run, number: int) -> tuple[LiveBytes, ...]:
    """Return an IPU's used bytes at every moment of forward pass, backward pass and weight update.

    If the IPU runs several stages of the model, the moments of an earlier stage come before those
    of a later stage. The largest returned number of used bytes is the memory that the IPU needs.
    Each returned number of used bytes includes the same number of bytes for gaps between variables.
    The number of bytes for gaps is computed from the moment that needs the most memory.
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
