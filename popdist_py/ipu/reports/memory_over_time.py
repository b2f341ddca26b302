"""The used memory of an IPU over time, during a micro-batch and during the weight update.

The function ``walks`` of the module ``memory`` provides the moments (passes of single operations)
and the data in memory at each moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.ipu.memory import category_of_block, walks
from popdist_py.ipu.memory_contents import Category, IpuMemory
from popdist_py.ipu.searches import Run
from popdist_py.ipu.tensor_liveness import live_at

__all__ = ["LiveBytes", "curve", "live_categories"]


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


def curve(run: Run, own: IpuMemory) -> tuple[LiveBytes, ...]:
    """Return an IPU's used bytes at every moment of forward pass, backward pass and weight update.

    If the IPU runs several stages of the model, the moments of an earlier stage come before those
    of a later stage. The largest returned number of used bytes is the memory that the IPU needs.
    Each number of used bytes includes the same bytes for gaps between variables, which are computed
    from the moment that needs the most memory.

    Args:
        run: The configuration of the run.
        own: The contents of the IPU's memory, which the function ``memory`` returns for the run.
    """
    found = []
    always_live = own.always_live
    for fetched, moments in walks(run.graph, run.placement, run.settings, run.ipu, own.ipu):
        base = always_live + sum(part.bytes for part in fetched)
        found += [
            LiveBytes(moment.name, base + total)
            for moment, (_, total) in zip(moments, live_at(moments), strict=True)
        ]
    return tuple(found)


def live_categories(run: Run, number: int, wanted: frozenset[int]) -> list[dict[Category, int]]:
    """Return the bytes of each category that are not always live, at some moments of an IPU.

    Args:
        run: The configuration of the run.
        number: The number of the IPU in its replica.
        wanted: The indices of the moments in the sequence that ``curve`` returns.
    """
    found = []
    index = 0
    for fetched, moments in walks(run.graph, run.placement, run.settings, run.ipu, number):
        for moment, (live, _) in zip(moments, live_at(moments), strict=True):
            if index in wanted:
                sums: dict[Category, int] = {}
                for part in fetched:
                    sums[part.category] = sums.get(part.category, 0) + part.bytes
                for name, size in live.items():
                    category = category_of_block(name)
                    sums[category] = sums.get(category, 0) + size
                sums["working set"] = moment.temporary
                found.append(sums)
            index += 1
    return found
