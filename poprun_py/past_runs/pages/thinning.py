"""What is drawn of many values: points of a line that looks the same, the range of a histogram.

Nothing here knows charts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A line has no more points than this; a screen has no more columns to show them in.
MOST_POINTS = 1000
# A few far outliers shall not press all others into one bin.
_SHOWN_PART, _SHOWN_BEYOND = 0.99, 1.15
_KEPT_OF_A_BUCKET = 3  # the least, the greatest, and one that is no number


def thinned(ys: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Return which points of a line to keep, in order; all of no more than ``most``.

    The points between the first and the last are put into buckets of neighbours. Of each bucket
    the least and the greatest stay, so that no peak is lost, and the first that is no finite
    number, so that no gap is.

    Args:
        ys: the values; None, NaN and infinities are gaps.
        most: how many may stay, at least 5.
    """
    count = len(ys)
    if count <= most:
        return list(range(count))
    buckets = (most - 2) // _KEPT_OF_A_BUCKET
    kept = {0, count - 1}
    for number in range(buckets):
        bucket = range(
            1 + (count - 2) * number // buckets, 1 + (count - 2) * (number + 1) // buckets
        )
        known = [(y, i) for i in bucket if (y := ys[i]) is not None and math.isfinite(y)]
        if known:
            kept |= {min(known)[1], max(known)[1]}
        if len(known) < len(bucket):
            kept.add(next(i for i in bucket if (y := ys[i]) is None or not math.isfinite(y)))
    return sorted(kept)


def usual_range(known: Sequence[float]) -> tuple[float, float]:
    """Return where the bins of sorted values begin and end."""
    if not known:
        return 0.0, 1.0
    usual = known[min(int(len(known) * _SHOWN_PART), len(known) - 1)]
    low = known[0]
    high = min(known[-1], low + (usual - low) * _SHOWN_BEYOND)
    if high <= low:  # all alike
        return low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    return low, high
