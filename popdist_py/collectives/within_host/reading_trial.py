"""The choice between two ways to reduce private arrays: copying to the slots, or direct reads.

A direct read copies from the memory of another process. The faster way depends on the machine's
caches, on the mapping of the array's pages, and on the number of instances. So the first calls with
equal arguments measure both ways: each way reduces one half of the array. Both ways add up in the
same order, so the results do not depend on the choice.

This module stores the times that its callers measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ReadingTrial"]

# The number of calls to measure. The first calls are slow because they touch new memory, and other
# programs may slow down single calls.
_CALLS = 6


@dataclass(slots=True)
class ReadingTrial:
    """The measured times of all-reduce calls with equal arguments.

    All instances of a host store the same times.

    Attributes:
        least_gain: Direct reads are faster only if the copies through the slots take longer by this
            factor.
        through_slots: For each call, the time per element when the data is copied through the
            slots, summed over all instances.
        reading: For each call, the time per element when an instance reads the memory of the other
            processes, summed over all instances.
    """

    least_gain: float = 1.0
    through_slots: list[int] = field(default_factory=list)
    reading: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether enough calls have been measured."""
        return len(self.reading) >= _CALLS

    @property
    def reading_is_faster(self) -> bool:
        """Whether the fastest call used direct reads; False until enough calls are measured."""
        return self.is_over and self.least_gain * min(self.reading) < min(self.through_slots)

    def add(self, through_slots: Sequence[int], reading: Sequence[int]) -> None:
        """Store the times of one all-reduce, which each instance of the host has measured."""
        self.through_slots.append(sum(through_slots))
        self.reading.append(sum(reading))
