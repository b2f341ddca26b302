"""Equal tracebacks of several instances are shown once, and nothing else is ever left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.screen import repeated_tracebacks
from poprun_py.running.screen.repeated_tracebacks import RepeatedTracebacks
from poprun_py.running.screen.tracebacks import equal_lines, find_traceback, normal_line

HEADER = b"Traceback (most recent call last):\n"
FRAME = b'  File "a.py", line 3, in f\n    g(x)\n'
KEY = HEADER + FRAME + b"KeyError: 'x'\n"
VALUE = HEADER + FRAME + b"ValueError: x\n"
LINK = b"\nDuring handling of the above exception, another exception occurred:\n\n"


class Heard:
    """What comes out, in order: bytes of an instance, or who wrote the same as whom."""

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


def test_the_first_is_shown_at_once_and_the_others_are_told_together():
    heard = Heard()
    heard.feed(2, KEY)
    assert heard.events == [(2, KEY)]
    assert heard.began == [2]
    for index in (0, 3, 1):
        heard.feed(index, KEY, 0.5)
    heard.repeats.on_time(1.0)
    assert len(heard.events) == 1
    heard.repeats.on_time(1.5)
    assert heard.events[1:] == [("same", (0, 1, 3), 2)]
    assert heard.repeats.next_deadline() == float("inf")


def test_the_end_of_all_instances_is_waited_for_no_longer():
    heard = Heard(2)
    heard.feed(0, KEY)
    heard.feed(1, KEY)
    heard.end(0, 1)
    assert heard.events == [(0, KEY), ("same", (1,), 0)]


def test_a_traceback_in_pieces_is_compared_as_a_whole():
    heard = Heard(2)
    for piece in range(0, len(VALUE), 5):
        heard.feed(0, VALUE[piece : piece + 5])
    # Only a header that comes whole begins a traceback that is held.
    heard.feed(1, HEADER)
    for piece in range(len(HEADER), len(VALUE), 7):
        heard.feed(1, VALUE[piece : piece + 7])
    heard.end(0, 1)
    assert b"".join(event[1] for event in heard.events if event[0] == 0) == VALUE


def test_others_are_shown_in_full():
    heard = Heard(4)
    heard.feed(0, KEY)
    heard.feed(1, VALUE)
    heard.feed(2, VALUE)
    heard.feed(3, KEY)
    heard.end(0, 1, 2, 3)
    assert heard.events == [(0, KEY), (1, VALUE), ("same", (2,), 1), ("same", (3,), 0)]


@pytest.mark.parametrize(
    "other", [KEY + LINK + VALUE, HEADER + FRAME, KEY[:-2], HEADER, KEY + VALUE, LINK + KEY + LINK]
)
def test_a_traceback_that_goes_on_differently_is_shown(other):
    for first, second in ((KEY + LINK + KEY, other), (other, KEY + LINK + KEY)):
        heard = Heard(2)
        heard.feed(0, first)
        heard.feed(1, second)
        heard.end(0, 1)
        assert b"".join(data for index, data in heard.events if index == 1) == second


def test_what_follows_a_repeated_traceback_is_shown_after_it():
    heard = Heard(3)
    heard.feed(0, KEY + b"bye from 0\n")
    heard.feed(1, b"hello\n" + KEY + b"bye from 1\n")
    heard.feed(2, KEY)
    assert heard.events[1:] == [(1, b"hello\n")]
    heard.repeats.on_time(1.0)
    heard.feed(2, b"later\n", 1.2)
    assert heard.events[2:] == [
        ("same", (1,), 0), (1, b"bye from 1\n"), ("same", (2,), 0), (2, b"later\n"),
    ]  # fmt: skip


def test_a_later_failure_is_told_again():
    heard = Heard(2)
    for now in (0.0, 10.0):
        heard.feed(0, KEY, now)
        heard.feed(1, KEY, now + 0.9)
        heard.repeats.on_time(now + 1.9)
    assert heard.events == [(0, KEY), ("same", (1,), 0)] * 2
    heard.feed(0, KEY, 20.0)
    heard.feed(1, KEY, 21.0)
    assert heard.events[4:] == [(0, KEY), (1, KEY)]


def test_ordinary_lines_never_wait():
    heard = Heard(2)
    heard.feed(0, KEY)
    for data in (b"Trace", b"Traceback of my own\n", b'{"text": "Traceback (most recent call last):'
                 b'\\n"}\n', b'"Traceback (most recent call last): x"\n'):  # fmt: skip
        heard.feed(1, data)
        assert heard.events[-1] == (1, data)


def test_what_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr(repeated_tracebacks, "_MOST_HELD", 200_000)
    heard, most = Heard(20), 0
    heard.feed(0, KEY)
    for _ in range(3):
        for index in range(1, 20):
            heard.feed(index, KEY + b"x" * 40_000)
            most = max(most, heard.repeats._size_held)
    assert 150_000 < most <= 200_000
    sizes = [0] * 20
    heard.end(*range(20))
    for index, data in (event for event in heard.events if event[0] != "same"):
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
def test_all_that_is_written_is_shown_or_told(steps):
    heard, now, sent = Heard(3), 0.0, [b"", b"", b""]
    for index, pieces, pause in steps:
        data = b"".join(pieces)
        sent[index] += data
        heard.feed(index, data, now)
        now += pause
        heard.repeats.on_time(now)
        deadline = heard.repeats.next_deadline()
        assert deadline == float("inf") or now < deadline <= now + 1
    heard.end(0, 1, 2)
    for index in range(3):
        mine = [e for e in heard.events if e[0] == index or (e[0] == "same" and index in e[1])]
        assert is_told(sent[index], mine), (sent[index], mine)


def is_told(sent, events):
    """Whether the events are all of ``sent``, where only whole tracebacks are not shown."""
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


# --- which are the same -----------------------------------------------------------------------


def normal(text, index):
    return [normal_line(line, index, f"node{index}", 7000 + index) for line in text.split("\n")]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: <Tensor object at 0x7f{0}ab{0}c0>",
        "RuntimeError: rank {0} has no data",
        "OSError: node{0}: no space left",
        "OSError: process 700{0} is gone",
        "RuntimeError: DataLoader worker (pid 81{0}) exited",
        "TimeoutError: at 2026-11-2{0} 10:00:0{0}.123",
        "[rank{0}]: ValueError: x",
    ],
)
def test_what_tells_instances_apart_is_no_difference(text):
    first, second = (normal(text.format(index), index) for index in (1, 2))
    assert first == second


@pytest.mark.parametrize(
    "text", ["KeyError: {0}", "ValueError: rank {0}{0} is lost", "line {0}", "OSError: node{0}{0}"]
)
def test_other_numbers_are_differences(text):
    first, second = (normal(text.format(index), index) for index in (1, 2))
    assert first != second


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 9, in <module>
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in f
    | ValueError: one
    +------------------------------------
"""
NOT_PYTHON = """  File "a.py", line 3
    a = (
        ^
SyntaxError: '(' was never closed
"""
RANKS = """[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 9, in <module>
[rank1]: ValueError: x
"""


@pytest.mark.parametrize("text", [GROUP, NOT_PYTHON, RANKS], ids=["group", "syntax", "torch"])
def test_tracebacks_of_other_kinds(text):
    lines = normal(text, 1)
    assert find_traceback(b"noise\n" + text.encode()) == len("noise\n")
    assert equal_lines(lines, lines) == len(lines)
    assert equal_lines(lines[:2], lines) == 0
