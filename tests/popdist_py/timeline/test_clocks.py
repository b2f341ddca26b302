"""The converted times of another host are never wrong by more than the stated error."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from popdist_py.timeline.clocks import ClockSample, clock_line

delays = st.tuples(st.integers(0, 10**7), st.integers(0, 10**7))


@given(
    st.integers(-(10**15), 10**15),
    st.floats(-1e-4, 1e-4),
    st.lists(delays, min_size=1, max_size=8),
    st.lists(delays, max_size=8),
    st.integers(0, 10**13),
)
def test_the_error_is_within_its_bound(offset, drift, early, late, length):
    """A clock that runs steadily fast or slow, asked at the start and at the end of a job."""

    def theirs(ours):
        return ours + offset + round(drift * ours)

    samples, now = [], 0
    for batch, start in ((early, 0), (late, length)):
        now = max(now, start)
        for there, back in batch:
            samples.append(ClockSample(now, theirs(now + there), now + there + back))
            now += there + back + 1
    line = clock_line(samples)
    # Only between the two that were chosen is the line known.
    inside = [m for m in (0, length // 3, length) if line.begin <= theirs(m) <= line.end]
    for moment in inside:
        tolerance = line.error + 2 + abs(drift) * 2e7
        assert abs(line.ours(theirs(moment)) - moment) <= tolerance


@given(st.lists(st.integers(0, 10**15), min_size=2, max_size=20), delays, delays)
def test_the_order_of_moments_stays(moments, first, second):
    line = clock_line(
        [
            ClockSample(0, 5_000 + first[0], sum(first)),
            ClockSample(10**12, 10**12 + second[0], 10**12 + sum(second)),
        ]
    )
    ours = [line.ours(moment) for moment in sorted(moments)]
    assert ours == sorted(ours)


def test_the_shortest_question_counts():
    line = clock_line([ClockSample(0, 500, 1000), ClockSample(2000, 9000, 2010)])
    assert (line.end_offset, line.error) == (2005 - 9000, 500)


def test_a_clock_that_nobody_asked_is_not_known():
    assert clock_line([]) is None
