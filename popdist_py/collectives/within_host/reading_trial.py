"""The choice between two ways to reduce arrays: copies through shared memory, or direct reads.

An instance can copy its array to its slot in shared memory, where the other instances read it. Or
the other instances can read the array directly from the memory of the process. Whether slots or
direct reads are faster depends on the machine's caches, on the mapping of the array's pages, and on
the number of instances. So the first calls with equal arguments reduce half of the array through
the slots and half by direct reads, and measure both times. Slots and direct reads give the same
results, because the arrays are added up in the same order.

The callers measure the times, and this module only stores and compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ReadingTrial"]

# The number of all-reduce calls to measure. The first calls are slow because they touch new memory.
# Other programs may slow down single calls.
_CALLS = 6


@dataclass(slots=True)
class ReadingTrial:
    """The measured times of all-reduce calls with equal arguments.

    All instances of a host store the same times.

    Attributes:
        least_gain: Direct reads count as faster only if copies through the slots take longer by
            this factor.
        through_slots: For each measured call, the time per element with copies through the slots,
            summed over all instances.
        reading: For each measured call, the time per element with direct reads, summed over all
            instances.
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
        """Whether direct reads were faster; False until enough calls have been measured."""
        return self.is_over and self.least_gain * min(self.reading) < min(self.through_slots)

    def add(self, through_slots: Sequence[int], reading: Sequence[int]) -> None:
        """Store the times of one all-reduce call. Each list has the time of every instance."""
        self.through_slots.append(sum(through_slots))
        self.reading.append(sum(reading))
