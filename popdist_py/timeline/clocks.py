"""The clocks of hosts: how far one is from another, and how well that is known.

Each host counts its own nanoseconds since it started. One asks another for its time: the answer was
given between the question and its arrival, as in NTP (RFC 5905, section 8). Pure arithmetic:
nothing here asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LOCAL", "ClockLine", "ClockSample", "clock_line"]


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question for the time of another host, all in nanoseconds.

    Attributes:
        sent: our clock when we asked.
        answer: its clock when it answered.
        received: our clock when the answer came.
    """

    sent: int
    answer: int
    received: int

    @property
    def offset(self) -> int:
        """What is added to its clock to get ours; wrong by ``error`` at most."""
        return (self.sent + self.received) // 2 - self.answer

    @property
    def error(self) -> int:
        """Half of the time that question and answer took: either may have taken all of it."""
        return (self.received - self.sent + 1) // 2


@dataclass(frozen=True, slots=True)
class ClockLine:
    """How another host's clock becomes ours: by two offsets, and a straight line between them.

    Attributes:
        begin: a moment of its clock.
        begin_offset: what is added there.
        end: a later moment of its clock; ``begin`` if only one is known.
        end_offset: what is added there.
        error: by how much a moment may be wrong, if its clock runs steadily between the two.
    """

    begin: int = 0
    begin_offset: int = 0
    end: int = 0
    end_offset: int = 0
    error: int = 0

    def ours(self, moment: int) -> int:
        """Return a moment of its clock on ours; before and after the two offsets the nearer's."""
        if moment <= self.begin or self.end <= self.begin:
            return moment + self.begin_offset
        if moment >= self.end:
            return moment + self.end_offset
        drift = self.end_offset - self.begin_offset
        share = drift * (moment - self.begin) // (self.end - self.begin)
        return moment + self.begin_offset + share


LOCAL = ClockLine()


def clock_line(samples: Sequence[ClockSample]) -> ClockLine | None:
    """Return the line through the best sample of the first half and the best of the second.

    Args:
        samples: by time; those of the job's start and of its end.

    Returns:
        None without samples: the clock is not known.
    """
    if not samples:
        return None
    # The middle of the job: a job that was lost has samples of its start only.
    middle = (samples[0].sent + samples[-1].received) // 2
    early = [sample for sample in samples if sample.sent <= middle]
    late = [sample for sample in samples if sample.sent > middle] or early
    first = min(early, key=lambda sample: sample.error)
    last = min(late, key=lambda sample: sample.error)
    return ClockLine(
        begin=first.answer,
        begin_offset=first.offset,
        end=last.answer,
        end_offset=last.offset,
        error=max(first.error, last.error),
    )
