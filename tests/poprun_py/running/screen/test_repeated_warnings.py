"""Equal warnings of several processes are shown once, and all other output is shown."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.screen.repeated_warnings import RepeatedWarnings

OWN = b"/a/b c/train.py:12: UserWarning: take care\n  warnings.warn(text)\n"
OLD = b"lib.py:3: numpy.FutureWarning: old\n  f(x)\n"
TORCH = b"[W1127 14:5%d:00.123456789 socket.cpp:755] [c10d] cannot connect from %s\n"
LONG = b"p.py:1: DeprecationWarning: \nPyarrow will be needed\n(as of 3.0)\n\n  import pandas\n"


class Shown:
    """The calls of RepeatedWarnings, which show output or tell of repeated warnings."""

    def __init__(self, count=3):
        self.events = []
        self.now = 0.0
        self.filter = RepeatedWarnings(self._show, self._tell)
        for index in range(count):
            self.filter.joined(index)

    def _show(self, index, data):
        self.events.append((index, data))

    def _tell(self, members, sentence):
        self.events.append((members, sentence))

    def feed(self, index, data):
        self.filter.feed(index, data, self.now, host=f"host{index}", pid=7000 + index)

    def wait(self, seconds):
        self.now += seconds
        self.filter.on_time(self.now)

    def end(self):
        for index in list(self.filter._writing):
            self.filter.ended(index, self.now)

    def of(self, index):
        return b"".join(data for shown, data in self.events if shown == index)


@pytest.fixture
def shown():
    return Shown()


def test_the_first_warning_is_shown_at_once_and_the_others_in_one_line(shown):
    shown.feed(1, OWN)
    assert shown.events == [(1, OWN)]
    for index in (2, 0):
        shown.feed(index, b"before\n" + OWN + b"after\n")
    assert shown.events[1:] == [(i, line) for i in (2, 0) for line in (b"before\n", b"after\n")]
    assert shown.filter.next_deadline() == 1.0
    shown.wait(1)
    assert shown.events[5:] == [
        ((0, 2), "the same warning as instance 1 (UserWarning, train.py:12)"),
    ]
    assert shown.filter.next_deadline() == float("inf")


def test_several_equal_warnings_are_told_in_one_line(shown):
    for index in range(3):
        shown.feed(index, OWN)
        shown.feed(index, OLD + b"[rank%d]:" % index + TORCH % (index, b"host%d" % index))
        shown.wait(0.1)
    shown.end()
    assert shown.events[3:] == [((1, 2), "the same 3 warnings as instance 0")]


def test_processes_of_one_instance_are_counted(shown):
    for _ in range(4):
        shown.feed(0, OWN)
    shown.wait(1)
    assert shown.events[1:] == [((0,), "the same warning 3 more times (UserWarning, train.py:12)")]
    for index in (0, 1, 1):
        shown.feed(index, OWN)
    shown.end()
    assert shown.events[2:] == [
        ((0, 1), "the same warning as instance 0, 3 times (UserWarning, train.py:12)")
    ]


def test_a_warning_that_recurs_is_shown_again_after_some_time(shown):
    for _ in range(200):
        shown.feed(0, OWN)
        shown.wait(0.1)
    assert [event for event in shown.events if event[0] == 0] == [(0, OWN)] * 2
    assert len(shown.events) == 5


def test_different_warnings_are_shown(shown):
    others = [
        OWN.replace(b"12", b"13"), OWN.replace(b"care", b"CARE"), OWN.replace(b"User", b"Future"),
        OWN.replace(b"(text)", b"(words)"), OWN.replace(b"/a/", b"/b/"), OLD,
    ]  # fmt: skip
    for data in (OWN, *others):
        shown.feed(1, data)
    assert shown.of(1) == b"".join((OWN, *others))


def test_parts_that_differ_between_instances_make_no_difference(shown):
    text = "x.py:1: UserWarning: rank {} of host{}, pid {}, at 0x7f{}0000, 10:00:0{}\n  f()\n"
    for index in range(3):
        shown.feed(index, text.format(index, index, 7000 + index, index, index).encode())
    shown.end()
    assert [event[0] for event in shown.events] == [0, (1, 2)]


@pytest.mark.parametrize(
    "line",
    [
        b"a Warning: no place\n", b"[WARNING] here\n", b"loss 0.1 UserWarning: x\n", b"[W\n",
        b"x.py:1: Note: x\n", b"10%|#  |\rx.py:1: UserWarning: x\n", b" x.py:1: UserWarning: x\n",
        b"WARNING:py.warnings:UserWarning: x\n", b"[W] Warning: x\n",
    ],
)  # fmt: skip
def test_lines_that_only_look_like_warnings_are_not_left_out(shown, line):
    for index in range(3):
        shown.feed(index, line * 2)
        assert shown.events[-1] == (index, line * 2)


def test_output_below_a_warning_is_not_left_out(shown):
    header = OWN.partition(b"\n")[0] + b"\n"
    for follower in (b"epoch 1\n", b"epoch 1\n  loss 3\nepoch 2\n", b"   three spaces\n", b"\n"):
        before = len(shown.events)
        for index in range(3):
            shown.feed(index, header + follower)
        assert b"".join(e[1] for e in shown.events[before:]) == (header + follower) * 3
    for index in range(3):
        shown.feed(index, header)
        shown.wait(0.1)
        shown.feed(index, b"  indented, but later\n")
    shown.end()
    assert shown.events[-4:] == [
        *((index, b"  indented, but later\n") for index in (0, 1, 2)),
        ((1, 2), "the same warning as instance 0 (UserWarning, train.py:12)"),
    ]
    # Python cannot show a source line of text that it has executed.
    for index in range(3):
        shown.feed(index, b"<string>:1: UserWarning: x\n  indented\n")
    assert b"".join(shown.of(i) for i in range(3)).count(b"  indented\n") == 3


def test_a_message_of_several_lines_is_one_warning(shown):
    for index in range(3):
        shown.feed(index, LONG + OWN)
    shown.end()
    assert shown.of(0) == LONG + OWN
    assert shown.events[-1] == ((1, 2), "the same 2 warnings as instance 0")
    assert shown.of(1) == shown.of(2) == b""


def test_a_warning_in_two_pieces_is_held_for_a_moment_only(shown):
    first, last = OWN[:52], OWN[52:]
    for index in range(2):
        shown.feed(index, first)
        assert shown.of(index) == b""
        shown.feed(index, last)
    assert shown.of(0) + shown.of(1) == OWN
    shown.feed(2, first)
    assert shown.filter.next_deadline() == pytest.approx(0.1)
    shown.wait(0.1)
    assert shown.of(2) == first
    shown.feed(2, last)  # the end of a line whose beginning is shown
    assert shown.of(2) == OWN


def test_what_is_remembered_is_bounded(shown):
    for number in range(1000):
        for index in range(2):
            shown.feed(index, b"x.py:%d: UserWarning: x\n  f()\n" % number)
    shown.feed(2, b"x.py:1: UserWarning: " + b"x" * 70_000)
    assert len(shown.filter._shown) <= 256
    assert len(shown.of(2)) > 70_000
    shown.end()
    assert shown.of(0).count(b"UserWarning") == 1000


def test_warnings_of_this_python_are_found(shown):
    program = "import warnings; warnings.simplefilter('always'); warnings.warn('x', FutureWarning)"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=True)
    own = warnings.formatwarning("text", UserWarning, __file__, 1).encode()
    for index in range(2):
        shown.feed(index, done.stderr + own)
    shown.end()
    assert shown.events[-1] == ((1,), "the same 2 warnings as instance 0")


def test_a_bar_below_a_warning_is_no_source_line(shown):
    bar = b"  12%|#  |\rdone\n"
    for _ in range(2):
        shown.feed(0, b"x.py:1: UserWarning: x\n" + bar)
    shown.end()
    assert shown.of(0).count(bar) == 2


LINES = [OWN, OWN, OLD, LONG, TORCH % (1, b"h"), b"line\n", b"part ", b"  12%|#  |\r", OWN[:30],
         OWN[30:], b"  indented\n", b"\n", b"x.py:1: UserWarning: x\n"]  # fmt: skip
# A word before the path may be the beginning of the path.
HEADER = re.compile(
    rb"(?:part )*(?:/a/b c/train|lib|p|x)\.py:\d+: [\w.]*Warning: [^\n]*\n|\[W[^\n]*\n"
)
MESSAGE = re.compile(rb"(?:(?!  \S)[^\n]*\n)*  \S[^\r\n]*\n")


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from(LINES), min_size=1, max_size=3),
                  st.sampled_from([0.0, 0.05, 0.2, 1.1])),
        max_size=25,
    )
)  # fmt: skip
def test_only_whole_warnings_are_left_out(steps):
    shown, sent = Shown(), [b"", b"", b""]
    for index, pieces, pause in steps:
        data = b"".join(pieces)
        sent[index] += data
        shown.feed(index, data)
        shown.wait(pause)
        deadline = shown.filter.next_deadline()
        assert deadline == float("inf") or shown.now < deadline <= shown.now + 10
    shown.end()
    for index in range(3):
        assert is_rest(sent[index], shown.of(index)), (sent[index], shown.of(index))


def is_rest(sent, found):
    """Return whether ``found`` is ``sent`` without some of the whole warnings."""
    if sent == found:
        return True
    if sent[:1] == found[:1] and sent and is_rest(sent[1:], found[1:]):
        return True
    return any(is_rest(sent[end:], found) for end in ends_of_warning(sent))


def ends_of_warning(sent):
    """Yield the possible ends of a warning at the beginning of ``sent``.

    Lines below a warning belong to its message if an indented line, the source line, ends them.
    """
    header = HEADER.match(sent)
    if header is not None:
        yield header.end()
        message = MESSAGE.match(sent, header.end())
        if message is not None:
            yield message.end()
