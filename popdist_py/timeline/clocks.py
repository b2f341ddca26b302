"""Conversion of times between the clocks of different hosts, with an estimate of the error.

Each host counts its own nanoseconds since it started. One host asks another host for its time. The
time in the answer was read between sending the question and receiving the answer, as in NTP (RFC
5905, section 8). This module contains only the arithmetic. The callers of this module ask the
hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question for the time of another host, with all times in nanoseconds.

    Attributes:
        sent: The time of the question on this host's clock.
        answer: The time of the answer on the other host's clock.
        received: The time on this host's clock when the answer arrived.
    """

    sent: int
    answer: int
    received: int

    @property
    def offset(self) -> int:
        """The nanoseconds to add to the other host's time to get this host's time.

        The offset is wrong by at most ``error``.
        """
        return (self.sent + self.received) // 2 - self.answer

    @property
    def error(self) -> int:
        """The largest error of ``offset``, which is half of the time between question and arrival.

        The error has this size if the question or the answer alone took the whole time.
        """
        return (self.received - self.sent + 1) // 2


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A conversion of another host's time to this host's time.

    The offset between the clocks changes linearly from one known offset to another.

    Attributes:
        begin: An earlier time on the other host's clock.
        begin_offset: The nanoseconds to add at ``begin``.
        end: A later time on the other host's clock, or ``begin`` if only one offset is known.
        end_offset: The nanoseconds to add at ``end``.
        error: The largest error of a converted time, if the other clock runs steadily between
            ``begin`` and ``end``.
    """

    begin: int = 0
    begin_offset: int = 0
    end: int = 0
    end_offset: int = 0
    error: int = 0

    def ours(self, moment: int) -> int:
        """Convert a time on the other host's clock to a time on this host's clock.

        Before ``begin``, ``begin_offset`` applies. After ``end``, ``end_offset`` applies.
        """
        if moment <= self.begin or self.end <= self.begin:
            return moment + self.begin_offset
        if moment >= self.end:
            return moment + self.end_offset
        drift = self.end_offset - self.begin_offset
        share = drift * (moment - self.begin) // (self.end - self.begin)
        return moment + self.begin_offset + share


LOCAL = ClockLine()


def clock_line(samples: Sequence[ClockSample]) -> ClockLine | None:
    """Return the line through the most accurate early sample and the most accurate late sample.

    Args:
        samples: Samples of the start and of the end of a job, sorted by time.

    Returns:
        The line, or None if there are no samples.
    """
    if not samples:
        return None
    # Samples before the middle between the first and the last sample are called early, and samples
    # after the middle are called late. This also holds for a lost job, which has only samples from
    # its start.
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
