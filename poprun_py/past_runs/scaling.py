"""How speed grows with the number of instances: which runs to make, and what they tell together.

The runs are interleaved (1, 2, 4, 1, 2, 4, ...), so that a machine that becomes slower for a while
slows all counts; of the repetitions of one count the median counts.

Pure: words and measured runs in, values out. Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun_py.errors import UsageError
from poprun_py.past_runs.comparison import Comparison, Entry

_RANGE: Final = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?", re.ASCII)
_MOST_COUNTS: Final = 64


@dataclass(frozen=True, slots=True)
class ScalingRun:
    """One run to make: its name, how many instances, and which repetition, from 1."""

    name: str
    instances: int
    repeat: int


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the counts of instances that ``1,2,4`` or ``1-4`` means; the first is the base.

    Raises:
        UsageError: it is something else, or a count is given twice.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else 0
        if not 1 <= low <= high or high - low >= _MOST_COUNTS:
            raise UsageError(
                f"--instances {text!r}: expected counts of instances such as 1,2,4 or 1-4, at most "
                f"{_MOST_COUNTS}"
            )
        found += range(low, high + 1)
    if len(set(found)) < len(found):
        twice = next(count for count in found if found.count(count) > 1)
        raise UsageError(f"--instances {text!r}: {twice} is given twice: give each count once")
    if len(found) > _MOST_COUNTS:
        raise UsageError(f"--instances {text!r}: {len(found)} counts; at most {_MOST_COUNTS}")
    return tuple(found)


def interleaved(prefix: str, counts: Sequence[int], repeats: int) -> tuple[ScalingRun, ...]:
    """Return the runs in the order in which to make them; their names begin with ``prefix``."""
    return tuple(
        ScalingRun(f"{prefix}-n{count}-{repeat}", count, repeat)
        for repeat in range(1, repeats + 1)
        for count in counts
    )


def ideal_speedup(comparison: Comparison, entry: Entry) -> float:
    """Return the speedup that ``entry`` would have if every instance were as fast as the base's."""
    return entry.instances / comparison.base.instances
