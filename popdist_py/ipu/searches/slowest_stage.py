"""The division of a model into stages whose slowest stage is as fast as possible.

The module ``slowest_stage`` only compares the times that its caller gives. The time and the memory
of a stage are not estimated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

__all__ = ["beginnings_that_fit", "least_slowest"]


def least_slowest(
    ends: Sequence[int],
    stages: int,
    work: Callable[[int, int, int], float],
    fits: Callable[[int, int, int], bool],
    windows: Sequence[tuple[int, int]] | None = None,
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
        windows: For each stage, the first and the last index in ``ends`` where the stage may begin.
            If ``windows`` is None, all places are tried.
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
        low, high = (stage, last - 1) if windows is None else windows[stage]
        firsts = range(max(stage, low), min(last - 1, high) + 1)
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


def beginnings_that_fit(
    ends: Sequence[int], stages: int, fits: Callable[[int, int, int], bool]
) -> list[tuple[int, int]] | None:
    """Return the windows in which stages can begin, or None if the stages do not fit.

    A window is a pair of the first and the last index in ``ends`` where a stage can begin so that
    all stages fit into memory. The function assumes that a part of a stage fits if the whole stage
    fits. It therefore tries few stages, and may overlook divisions in which that is not true.

    Args:
        ends: The numbers of the operations before which a stage may begin or end.
        stages: The number of stages into which the model is divided.
        fits: The function of ``least_slowest`` that tells whether a stage fits into memory.
    """
    last = len(ends) - 1
    latest = [0]
    for stage in range(stages):
        begin, after = latest[-1], stages - 1 - stage

        def reaches(length: int, begin: int = begin, stage: int = stage) -> bool:
            return fits(ends[begin], ends[begin + length], stage)

        latest.append(begin + _longest(reaches, last - after - begin, last // stages))
        if latest[-1] == begin:
            return None
    if latest[-1] < last:
        return None
    earliest = [last]
    for stage in reversed(range(1, stages)):
        end = earliest[-1]

        def reaches_back(length: int, end: int = end, stage: int = stage) -> bool:
            return fits(ends[end - length], ends[end], stage)

        earliest.append(end - _longest(reaches_back, end - stage, last // stages))
        if earliest[-1] == end:
            return None
    return list(zip([0, *reversed(earliest[1:])], latest[:-1], strict=True))


def _longest(reaches: Callable[[int], bool], most: int, near: int) -> int:
    """Return the largest length up to ``most`` for which ``reaches`` is true, or 0.

    The search begins with the length ``near``, because ``reaches`` takes long for large lengths.
    """
    below, above = 0, max(1, min(near, most))
    while below < most and reaches(above):
        below, above = above, min(2 * above, most)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if reaches(middle) else (below, middle)
    return below


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
