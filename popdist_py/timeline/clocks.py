"""Conversion of times between the clocks of different hosts, with an estimate of the error.

The clock of each host counts the nanoseconds since the host started. To compare two clocks, one
host asks the other host for its time. The other host reads its clock after the question was sent
and before the answer is received, as in NTP (RFC 5905, section 8). This module contains only the
arithmetic. The callers of this module ask the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One request for the time of another host, with all times in nanoseconds.

    Attributes:
        sent: The time on this host's clock when this host sent the request.
        answer: The time on the other host's clock when that host answered.
        received: The time on this host's clock when this host received the answer.
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
        """The largest possible error of ``offset``.

        It is half of the time from sending the question to receiving the answer. The error has this
        size if either the question or the answer needed no time at all.
        """
        return (self.received - self.sent + 1) // 2


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A conversion of another host's time to this host's time.

    The offset between the clocks changes linearly from one known offset to another.

    Attributes:
        begin: The time on the other host's clock of the first known offset.
        begin_offset: The nanoseconds to add to a time of the other host until ``begin``.
        end: The time on the other host's clock of the second known offset, or ``begin`` if only one
            offset is known.
        end_offset: The nanoseconds to add to a time of the other host from ``end`` on.
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

        Times before ``begin`` are converted with ``begin_offset``, and times after ``end`` with
        ``end_offset``.
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
