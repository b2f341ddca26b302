"""The division of a model into stages whose slowest stage is as fast as possible.

The module ``slowest_stage`` only compares the times that its caller gives. The time and the memory
of a stage are not estimated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

__all__ = ["least_slowest"]


def least_slowest(
    ends: Sequence[int],
    stages: int,
    work: Callable[[int, int, int], float],
    fits: Callable[[int, int, int], bool],
) -> tuple[int, ...] | None:
    """Return the ends of stages that fit into memory and make the slowest stage fastest.

    The returned ends of stages are a selection from ``ends``. The function returns None if the
    stages cannot fit into memory. The function first computes the best division for unlimited
    memory, which decides which places the search tries first, and when the search ends.

    Args:
        ends: The numbers of the operations before which a stage may begin or end.
        stages: The number of stages into which the model is divided.
        work: A function that returns the computing time of a pipeline stage for one micro-batch.
            The arguments of the given function are the places where the stage begins and ends, and
            the number of the stage.
        fits: A function that tells whether a pipeline stage fits into the memory of its IPU. The
            arguments of the given function are the places where the stage begins and ends, and the
            number of the stage.
    """
    ideal = _ideal(ends, stages, work)

    def options(stage: int, last: int) -> list[tuple[float, int]]:
        """Return each possible beginning of a stage, with the least time of the slowest stage.

        The least time of the slowest stage is computed for unlimited memory, for the stage
        ``stage`` and all earlier stages.
        """
        if not stage:
            return [(ideal[0][last], 0)]
        before = ideal[stage - 1]
        firsts = range(stage, last)
        return sorted((max(before[f], work(ends[f], ends[last], stage)), f) for f in firsts)

    @cache
    def best(stage: int, last: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the best division of the operations before ``ends[last]`` into stages.

        The stages of the returned division have the numbers from 0 to ``stage``.

        The returned division contains the time of the slowest stage, and the place (index of an
        operation) where each stage ends.
        """
        found = None
        for least, first in options(stage, last):
            if found is not None and least >= found[0]:
                break
            before = best(stage - 1, first) if stage else (least, (0,))
            if before is not None and fits(ends[first], ends[last], stage):
                slowest = max(least, before[0])
                if found is None or slowest < found[0]:
                    found = slowest, (*before[1], ends[last])
        return found

    found = best(stages - 1, len(ends) - 1)
    return None if found is None else found[1]


def _ideal(
    ends: Sequence[int], stages: int, work: Callable[[int, int, int], float]
) -> list[list[float]]:
    """Return the least possible time of the slowest stage, for unlimited memory.

    For each stage, the returned list contains a list of the times that the slowest stage up to this
    stage needs. A list of times contains one time for each place where its stage can end.
    """
    table = [[work(0, end, 0) for end in ends]]
    for stage in range(1, stages):
        before = table[-1]
        row = []
        for last, end in enumerate(ends):
            firsts = range(stage, last)
            options = (max(before[f], work(ends[f], end, stage)) for f in firsts)
            row.append(min(options, default=inf))
        table.append(row)
    return table
