"""The choice between reducing a private array through the slots and by reading its memory.

The faster way depends on the machine's caches, on the mapping of the array's pages, and on the
number of instances. So the first calls with each signature try both: each way reduces one half of
the array. Both ways add up in the same order, so results do not depend on the times.

This module stores the times that its callers measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ReadingTrial"]

# Several calls are needed. The first calls touch new memory, and other programs disturb some calls.
_CALLS = 6


@dataclass(slots=True)
class ReadingTrial:
    """The times of the calls with one signature, which are equal on all instances of a host.

    Attributes:
        through_slots: For each call, the sum of all instances' times per element through the slots.
        reading: For each call, the sum of all instances' times per element by reading.
    """

    through_slots: list[int] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the trial has the times of enough calls."""
        return len(self.reading) >= _CALLS

    @property
    def reading_is_faster(self) -> bool:
        """Whether reading is faster, by the shortest time of each way; False during the trial."""
        return self.is_over and min(self.reading) < min(self.through_slots)

    def add(self, through_slots: Sequence[int], reading: Sequence[int]) -> None:
        """Add the times of all instances of the host in one call."""
        self.through_slots.append(sum(through_slots))
        self.reading.append(sum(reading))
