"""Which way of reducing a private array is faster: through the slots, or by reading its memory.

It depends on the machine's caches, on how the array's pages are mapped, and on the number of
instances, so the first calls with each array try both: each way reduces one part of the array. Both
add up in the same order, so results do not depend on the times.

Nothing here moves or reduces data, or takes times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ReadingTrial"]

# The first calls also touch memory for the first time, and other programs disturb some.
_CALLS = 6


@dataclass(slots=True)
class ReadingTrial:
    """What the calls with one signature have shown; all instances of a host hold equal ones.

    Attributes:
        through_slots: for each call, the sum over the instances of their times per element.
        reading: the same for the other way.
    """

    through_slots: list[int] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether enough calls were tried."""
        return len(self.reading) >= _CALLS

    @property
    def reading_is_faster(self) -> bool:
        """Whether arrays are read from now on; the best of the calls counts."""
        return self.is_over and min(self.reading) < min(self.through_slots)

    def add(self, through_slots: Sequence[int], reading: Sequence[int]) -> None:
        """Add one call: the times of all instances of the host."""
        self.through_slots.append(sum(through_slots))
        self.reading.append(sum(reading))
