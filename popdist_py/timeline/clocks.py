"""Conversion of times between the clocks of different hosts, with an estimate of the error.

The clock of each host counts the nanoseconds since the host started. To compare two clocks, one
host asks the other host for its time. The other host reads its clock after the request was sent and
before the answer is received, as in NTP (RFC 5905, section 8). This module only computes the
conversion. The module's callers request the times from the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A measurement of another host's clock by one request, with all times in nanoseconds.

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

        The offset is wrong by at most ``error`` nanoseconds.
        """
        return (self.sent + self.received) // 2 - self.answer

    @property
    def error(self) -> int:
        """The largest possible error of ``offset``.

        The error is half of the time from sending the request to receiving the answer. The error is
        largest if one of the two messages, the request or the answer, takes no time.
        """
        return (self.received - self.sent + 1) // 2


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A conversion of another host's time to this host's time.

    Between two measured offsets, the offset between the clocks is interpolated linearly.

    Attributes:
        begin: The other host's time at which the first offset was measured.
        begin_offset: The nanoseconds to add to times of the other host that are not after
            ``begin``.
        end: The other host's time at which the second offset was measured, or ``begin`` if only one
            offset was measured.
        end_offset: The nanoseconds to add to times of the other host that are not before ``end``.
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
    """Return the conversion from the most accurate early and the most accurate late clock sample.

    Args:
        samples: Clock samples from the start and from the end of a job, sorted by time.

    Returns:
        The conversion, or None if ``samples`` is empty.
    """
    if not samples:
        return None
    # A clock sample is early if it is from the first half of the time between the first and the
    # last sample. Clock samples from the second half are late. If a job was lost, all its clock
    # samples are from its start, but they are divided in the same way.
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
