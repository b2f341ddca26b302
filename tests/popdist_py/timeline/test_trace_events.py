"""Events of a trace contain all spans, nest correctly, and have arrows forward in time."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.trace_tables import tables

from popdist_py.timeline.span_file import Span
from popdist_py.timeline.trace_events import (
    Call,
    Rows,
    flow_events,
    lanes,
    most_waited_for,
    process_events,
    span_events,
)

pairs = st.tuples(st.integers(0, 60), st.integers(0, 30))
any_spans = st.lists(
    st.builds(
        lambda name, track, pair: Span(name, track, pair[0], pair[0] + pair[1]),
        st.sampled_from("ab"),
        st.sampled_from(["program", "device"]),
        pairs,
    ),
    max_size=40,
)


def nest(one, other):
    """Whether two spans are apart, or one inside the other."""
    apart = one.end <= other.begin or other.end <= one.begin
    inside = one.begin <= other.begin and other.end <= one.end
    return apart or inside or (other.begin <= one.begin and one.end <= other.end)


@given(any_spans)
def test_in_a_lane_all_spans_nest_and_none_is_lost(spans):
    found = lanes(spans)
    assert Counter(span for lane in found for span in lane) == Counter(spans)
    for lane in found:
        assert all(nest(a, b) for place, a in enumerate(lane) for b in lane[place:])


def nested(depth, begin, end):
    """Return nested spans, each inside the previous span."""
    return [Span("s", "program", begin + i, end - i) for i in range(depth)]


@given(st.integers(1, 20), st.integers(1, 5))
def test_what_a_program_nests_is_one_lane(depth, times):
    spans = [span for i in range(times) for span in nested(depth, i * 100, i * 100 + 99)]
    assert len(lanes(reversed(spans))) == 1


@given(any_spans)
def test_a_strict_reader_takes_every_span(spans):
    """Also one that cuts times off to nanoseconds: 1001 / 1000 * 1000 is less than 1001."""
    rows = Rows(3, itertools.count(10))
    found = [*process_events(3, "instance 2"), *span_events(spans, 3, rows, lambda ns: ns * 1001)]
    db = tables([*found, *rows.events()])
    count, first = db.execute("SELECT COUNT(*), MIN(ts) FROM slice").fetchone()
    assert count == len(spans)
    assert first == min((span.begin * 1001 for span in spans), default=None)


def test_rows_of_ipus_stand_below_the_device_in_their_order():
    tracks = ["collectives", "IPU 10", "IPU 9", "device", "program", "IPU 0"]
    rows = Rows(1, itertools.count(10))
    assert list(span_events([Span("s", track, 0, 1) for track in tracks], 1, rows, int))
    names = {event["tid"]: event["args"]["name"] for event in rows.events() if _names(event)}
    places = {
        event["tid"]: event["args"]["sort_index"] for event in rows.events() if not _names(event)
    }
    # Perfetto sorts rows by their sort index, and rows with equal indices by their number.
    shown = [names[row] for row in sorted(names, key=lambda row: (places[row], row))]
    assert shown == ["program", "device", "IPU 0", "IPU 9", "IPU 10", "collectives"]


def _names(event):
    return event["name"] == "thread_name"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 50)), max_size=20),
)
def test_arrows_join_the_same_call_of_several_instances_in_the_order_of_arrival(made):
    begins = {(number, process): begin for number, process, begin in made}
    calls = [
        Call(("1", "reduce", number), begin, process, process)
        for (number, process), begin in begins.items()
    ]
    events = list(flow_events(calls))
    groups = Counter(number for number, _ in begins)
    assert len(events) == sum(count for count in groups.values() if count > 1)
    for identity in {event["id"] for event in events}:
        arrow = [event for event in events if event["id"] == identity]
        assert [e["ph"] for e in arrow] == ["s", *"t" * (len(arrow) - 2), "f"]
        assert [e["ts"] for e in arrow] == sorted(e["ts"] for e in arrow)
        assert len({e["pid"] for e in arrow}) == len(arrow)


def test_the_instance_that_the_others_waited_for_most_is_named():
    """The first call does not count, and half of all waiting time is not enough to be named."""
    begins = {"a": [(0, 900), (10, 30), (50, 40)], "b": [(0, 900), (7, 0), (3, 10)]}
    calls = {
        name: [
            Call(("1", "reduce", number), 1000 * number + begin, process, process)
            for number, pair in enumerate(pairs)
            for process, begin in enumerate(pair, start=1)
        ]
        for name, pairs in begins.items()
    }
    assert most_waited_for(calls["a"]) == (2, 20)
    assert most_waited_for(calls["b"]) is None
    assert most_waited_for([]) is None
