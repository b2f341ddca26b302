"""Files of spans return the spans that were written, also after a killed or limited write."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.timeline.span_file import (
    MIN_FILE_BYTES,
    Span,
    SpanWriter,
    level_of_step,
    read_header,
    read_spans,
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spans")


@pytest.fixture
def path(folder):
    return folder / f"{next(_numbers)}.spans"


def write(writer, span, step=0):
    writer.write(
        writer.intern(span.name),
        writer.intern(span.track),
        span.begin,
        span.end,
        level=level_of_step(step),
        number=-1 if span.number is None else span.number,
        arguments=span.arguments,
    )


times = st.integers(0, 2**62)
spans = st.builds(
    lambda name, track, pair, number, arguments: Span(
        name, track, min(pair), max(pair), number, arguments
    ),
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.sampled_from(["program", "device"]),
    st.tuples(times, times),
    st.none() | st.integers(0, 2**62),
    st.sampled_from(["", '{"a": 1}']),
)


@given(st.lists(spans, max_size=20))
def test_what_is_written_comes_back(folder, written):
    path = folder / f"{next(_numbers)}.spans"
    writer = SpanWriter(path, MIN_FILE_BYTES, "worker", (17, 4))
    for span in written:
        write(writer, span)
    read = read_spans(path.read_bytes())
    assert sorted(read.spans, key=repr) == sorted(written, key=repr)
    assert (read.label, read.dropped) == ("worker", 0)
    assert (read.header.wall_ns, read.header.monotonic_ns) == (17, 4)
    assert read_header(path) == read.header
    path.unlink()


def test_what_is_open_is_there_until_it_is_closed(path):
    """More than there are places for are not told of, and take nothing from the others."""
    writer = SpanWriter(path, MIN_FILE_BYTES, "", (0, 5))
    name, track = writer.intern("hangs"), writer.intern("device")
    places = [writer.open(name, track, begin, begin) for begin in range(10, 110)]
    assert None not in places[:64]
    assert set(places[64:]) == {None}
    for place in places[1:64]:
        writer.close(place)
    expected = Span("hangs", "device", 10, 10, 10, is_open=True)
    assert read_spans(path.read_bytes()).open == (expected,)
    write(writer, Span("later", "device", 20, 30))
    assert read_spans(path.read_bytes()).open == (replace(expected, end=30),)
    writer.write(name, track, 10, 40)  # killed before it was closed
    assert read_spans(path.read_bytes()).open == ()
    assert writer.open(name, track, 50) == places[-37]
    data = bytearray(path.read_bytes())
    assert len(read_spans(bytes(data)).open) == 1
    data[writer._layout.names[0] - 1] ^= 4  # its begin, at the end of the last place
    assert read_spans(bytes(data)).open == ()


def test_100_000_spans_stay_in_a_file_of_its_size(path):
    """The first and the last are there, and of the steps between, those that 8, 64, ... divide."""
    writer = SpanWriter(path, 1 << 18, "", (0, 0))
    total = 100_000
    for step in range(1, total + 1):
        write(writer, Span("step", "device", step, step + 1), step)
    assert path.stat().st_size == 1 << 18
    assert path.stat().st_mode & 0o777 == 0o600
    read = read_spans(path.read_bytes())
    kept = {span.begin for span in read.spans}
    assert len(kept) == len(read.spans) == total - read.dropped
    assert {*range(1, 400)} <= kept
    for level in range(5):
        of_level = [step for step in range(1, total + 1) if level_of_step(step) == level]
        assert set(of_level[-20:]) <= kept


def test_every_instance_keeps_the_same_steps():
    assert [level_of_step(step) for step in (0, 1, 7, 8, 9, 63, 64, 512, 8**6, 8**9)] == [
        *(0, 0, 0, 1, 0, 0, 2, 3, 6, 6)
    ]


def test_a_record_that_was_cut_short_is_left_out(path):
    writer = SpanWriter(path, MIN_FILE_BYTES, "", (0, 0))
    for number in range(3):
        write(writer, Span(f"span {number}", "program", number, number))
    data = bytearray(path.read_bytes())
    first = writer._layout.regions[0][0]
    data[first] ^= 4  # its number at one end
    assert [span.name for span in read_spans(bytes(data)).spans] == ["span 1", "span 2"]


@pytest.mark.parametrize("keep", [0, 10, 100, MIN_FILE_BYTES - 1])
def test_what_is_no_whole_file_is_none(path, keep):
    SpanWriter(path, MIN_FILE_BYTES, "", (0, 0))
    assert read_spans(path.read_bytes()[:keep]) is None
    assert read_spans(bytes(MIN_FILE_BYTES)) is None


def test_more_names_than_fit_share_one(path):
    writer = SpanWriter(path, MIN_FILE_BYTES, "", (0, 0))
    for number in range(2000):
        write(writer, Span(f"name {number}", "t", 0, 0))
    names = {span.name for span in read_spans(path.read_bytes()).spans}
    assert "name 1" in names
    assert "(more names than fit)" in names


def test_arguments_that_were_overwritten_are_lost_and_the_span_is_not(path):
    writer = SpanWriter(path, MIN_FILE_BYTES, "", (0, 0))
    span = Span("a", "t", 0, 0, None, '{"text": "' + "x" * 500 + '"}')
    for number in range(20):
        write(writer, replace(span, begin=number, end=number))
    read = read_spans(path.read_bytes())
    by_begin = {one.begin: one.arguments for one in read.spans}
    assert len(by_begin) == 20
    assert by_begin[0] == ""
    assert by_begin[19] == span.arguments
