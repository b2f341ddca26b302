"""Live bytes along a run: what an IPU holds at every moment of a micro-batch and of the update.

Nothing here decides what is live: it follows the walks of the memory model.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.liveness import live_at
from popdist_py.ipu.memory import ipu_memory, walks
from popdist_py.ipu.searches import Run

__all__ = ["LiveBytes", "curve"]


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """What an IPU holds at one moment.

    Attributes:
        moment: the operation and its pass: ``layer1.0.conv1 (backward)``.
        bytes: of the whole IPU, with what is always live.
    """

    moment: str
    bytes: int


def curve(run: Run, number: int) -> tuple[LiveBytes, ...]:
    """Return what an IPU holds at every moment, stage by stage: forward, backward, update.

    The highest is what the IPU needs: gaps between variables are those of that moment.
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
