"""Equal tracebacks of several instances are shown once, and all other output is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.screen import repeat_filter
from poprun_py.running.screen.repeat_filter import RepeatedTracebacks

HEADER = b"Traceback (most recent call last):\n"
FRAME = b'  File "a.py", line 3, in f\n    g(x)\n'
KEY = HEADER + FRAME + b"KeyError: 'x'\n"
VALUE = HEADER + FRAME + b"ValueError: x\n"
LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"


class Shown:
    """The calls of RepeatedTracebacks, which show output or tell of repeated tracebacks."""

    def __init__(self, count=4):
        self.events = []
        self.began = []
        self.repeats = RepeatedTracebacks(self._show, self.began.append, self._tell)
        for index in range(count):
            self.repeats.joined(index)

    def _show(self, index, data):
        self.events.append((index, data))

    def _tell(self, members, shown):
        self.events.append(("same", members, shown))

    def feed(self, index, data, now=0.0):
        self.repeats.feed(index, data, now, host=f"host{index}", pid=7000 + index)

    def end(self, *indices):
        for index in indices:
            self.repeats.ended(index)


def test_the_first_traceback_is_shown_at_once_and_the_others_in_one_line():
    shown = Shown()
    shown.feed(2, KEY)
    assert shown.events == [(2, KEY)]
    assert shown.began == [2]
    for index in (0, 3, 1):
        shown.feed(index, KEY, 0.5)
    shown.repeats.on_time(1.0)
    assert len(shown.events) == 1
    shown.repeats.on_time(1.5)
    assert shown.events[1:] == [("same", (0, 1, 3), 2)]
    assert shown.repeats.next_deadline() == float("inf")


def test_repeated_tracebacks_are_told_at_the_end_of_all_instances():
    shown = Shown(2)
    shown.feed(0, KEY)
    shown.feed(1, KEY)
    shown.end(0, 1)
    assert shown.events == [(0, KEY), ("same", (1,), 0)]


def test_a_traceback_in_pieces_is_compared_as_a_whole():
    shown = Shown(2)
    for piece in range(0, len(VALUE), 5):
        shown.feed(0, VALUE[piece : piece + 5])
    # A traceback is held only if its header comes as a whole.
    shown.feed(1, HEADER)
    for piece in range(len(HEADER), len(VALUE), 7):
        shown.feed(1, VALUE[piece : piece + 7])
    shown.end(0, 1)
    assert b"".join(event[1] for event in shown.events if event[0] == 0) == VALUE


def test_different_tracebacks_are_shown_in_full():
    shown = Shown(4)
    shown.feed(0, KEY)
    shown.feed(1, VALUE)
    shown.feed(2, VALUE)
    shown.feed(3, KEY)
    shown.end(0, 1, 2, 3)
    assert shown.events == [(0, KEY), (1, VALUE), ("same", (2,), 1), ("same", (3,), 0)]


@pytest.mark.parametrize(
    "other", [KEY + LINK + VALUE, HEADER + FRAME, KEY[:-2], HEADER, KEY + VALUE, LINK + KEY + LINK]
)
def test_a_traceback_that_continues_differently_is_shown(other):
    for first, second in ((KEY + LINK + KEY, other), (other, KEY + LINK + KEY)):
        shown = Shown(2)
        shown.feed(0, first)
        shown.feed(1, second)
        shown.end(0, 1)
        assert b"".join(data for index, data in shown.events if index == 1) == second


def test_output_after_a_repeated_traceback_is_shown_after_its_line():
    shown = Shown(3)
    shown.feed(0, KEY + b"bye from 0\n")
    shown.feed(1, b"hello\n" + KEY + b"bye from 1\n")
    shown.feed(2, KEY)
    assert shown.events[1:] == [(1, b"hello\n")]
    shown.repeats.on_time(1.0)
    shown.feed(2, b"later\n", 1.2)
    assert shown.events[2:] == [
        ("same", (1,), 0), (1, b"bye from 1\n"), ("same", (2,), 0), (2, b"later\n"),
    ]  # fmt: skip


def test_a_later_equal_failure_is_shown_again():
    shown = Shown(2)
    for now in (0.0, 10.0):
        shown.feed(0, KEY, now)
        shown.feed(1, KEY, now + 0.9)
        shown.repeats.on_time(now + 1.9)
    assert shown.events == [(0, KEY), ("same", (1,), 0)] * 2
    shown.feed(0, KEY, 20.0)
    shown.feed(1, KEY, 21.0)
    assert shown.events[4:] == [(0, KEY), (1, KEY)]


def test_ordinary_lines_are_not_held():
    shown = Shown(2)
    shown.feed(0, KEY)
    for data in (b"Trace", b"Traceback of my own\n", b'{"text": "Traceback (most recent call last):'
                 b'\\n"}\n', b'"Traceback (most recent call last): x"\n'):  # fmt: skip
        shown.feed(1, data)
        assert shown.events[-1] == (1, data)


def test_held_output_is_bounded(monkeypatch):
    monkeypatch.setattr(repeat_filter, "_MOST_HELD", 200_000)
    shown, most = Shown(20), 0
    shown.feed(0, KEY)
    for _ in range(3):
        for index in range(1, 20):
            shown.feed(index, KEY + b"x" * 40_000)
            most = max(most, shown.repeats._size_held)
    assert 150_000 < most <= 200_000
    sizes = [0] * 20
    shown.end(*range(20))
    for index, data in (event for event in shown.events if event[0] != "same"):
        sizes[index] += data.count(b"x" * 1000)
    assert sizes[1:] == [120] * 19


PIECES = [HEADER, FRAME, b"KeyError: 'x'\n", b"ValueError: y\n", LINK, b"\n", b"line\n", b"part ",
          KEY, KEY, VALUE, b"  12%|#  |\r", b'  File "a.py", line 3\n']  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
                  st.sampled_from([0.0, 0.3, 1.1])),
        max_size=25,
    )
)  # fmt: skip
def test_all_output_is_shown_or_told_as_repeated(steps):
    shown, now, sent = Shown(3), 0.0, [b"", b"", b""]
    for index, pieces, pause in steps:
        data = b"".join(pieces)
        sent[index] += data
        shown.feed(index, data, now)
        now += pause
        shown.repeats.on_time(now)
        deadline = shown.repeats.next_deadline()
        assert deadline == float("inf") or now < deadline <= now + 1
    shown.end(0, 1, 2)
    for index in range(3):
        mine = [e for e in shown.events if e[0] == index or (e[0] == "same" and index in e[1])]
        assert is_told(sent[index], mine), (sent[index], mine)


def is_told(sent, events):
    """Return whether the events cover ``sent``, and only whole tracebacks were replaced."""
    if not events:
        return not sent
    (kind, data, *_), *rest = events
    if kind != "same":
        return sent.startswith(data) and is_told(sent[len(data) :], rest)
    ends = range(1, len(sent) + 1) if sent.startswith((HEADER, b"  File")) else ()
    return any(is_told(sent[n:], rest) for n in ends if has_exception(sent[:n]))


def has_exception(text):
    lines = text.split(b"\n")[1:]
    return any(line and not line.startswith((b" ", b"Traceback", b"During")) for line in lines)
