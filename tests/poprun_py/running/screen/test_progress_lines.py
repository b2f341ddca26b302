"""Progress bars without a terminal are whole lines, and the last state is always shown."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu_time import limited_cpu_time
from tqdm import tqdm

from poprun_py.running.screen.progress_lines import INTERVAL_SECONDS, ProgressLines
from poprun_py.running.screen.tagged_output import Screen, make_stream


def lines_of(steps):
    """Return the lines shown for pieces of output, given as pairs of bytes and time."""
    progress = ProgressLines()
    shown = b"".join(progress.feed(data, now) for data, now in steps) + progress.finish(1e6)
    return shown.decode().splitlines()


def test_the_first_state_one_every_ten_seconds_and_the_last_are_shown():
    steps = [(b"\r%d%%" % n, n / 4) for n in range(101)] + [(b"\n", 25.25)]
    # The state 0 % is complete when 1 % begins.
    assert lines_of(steps) == ["0%", "40%", "80%", "100%"]


def test_a_quick_bar_after_another_is_one_line():
    epoch = [(b"\r  0%", 0.1), (b"\r 50%", 0.2), (b"\r100%", 0.3), (b"\n", 0.4)]
    assert lines_of(epoch + epoch) == ["  0%", "100%", "100%"]


def test_a_bar_that_ends_without_a_newline_or_is_erased_keeps_its_last_state():
    assert lines_of([(b"\r0%", 0), (b"\r99%", 1)]) == ["0%", "99%"]
    assert lines_of([(b"\r0%", 0), (b"\r99%", 1), (b"\r   \r", 2), (b"\n", 3)]) == ["0%", "99%"]


def test_text_before_a_bar_is_its_first_state():
    assert lines_of([(b"loading ", 0), (b"\r 0%", 1), (b"\r 9%\n", 2)]) == ["loading ", " 9%"]
    assert lines_of([(b"10%\r", 0), (b"20%\r", 1), (b"30%\r\n", 2)]) == ["10%", "30%"]


def test_a_megabyte_of_short_lines_takes_less_than_seconds():
    data = b"x\r\n" * (1 << 19)
    with limited_cpu_time(5):
        assert ProgressLines().feed(data, 0.0) == data


def test_a_bar_without_new_output_is_shown_when_it_is_due():
    progress = ProgressLines()
    assert progress.due_at() == float("inf")
    assert progress.feed(b"\r 1%", 0.0) == b""
    assert progress.due_at() == 0.0
    assert progress.overdue(0.1) == b" 1%\n"
    assert progress.feed(b"\r 2%", 1.0) == b""
    assert progress.due_at() == 0.1 + INTERVAL_SECONDS
    assert progress.overdue(10.0) == b""
    assert progress.overdue(10.2) == b" 2%\n"
    assert progress.due_at() == float("inf")


class Timed(io.StringIO):
    """A file for tqdm, whose clock advances by 0.05 s per write."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def write(self, text):
        self.steps.append((text.encode(), 0.05 * len(self.steps)))


@pytest.mark.parametrize("leave", [False, True])
def test_bars_above_one_another_each_keep_their_states(leave):
    file = Timed()
    for _ in tqdm(range(4), desc="epoch", file=file, mininterval=0):
        for _ in tqdm(range(200), desc="step", file=file, mininterval=0, leave=leave):
            pass
    file.write("done\n")
    lines = lines_of(file.steps)
    assert len(lines) < 40
    assert lines[0].startswith("epoch:   0%")
    assert [line for line in lines if line.startswith("epoch: 100%")]
    assert lines[-1] == "done"
    assert not any("\x1b" in line or "\r" in line for line in lines)


TEXT = st.lists(st.sampled_from(["a", "ü", " ", "\x1b[A", "漢"])).map("".join).map(str.encode)


@given(st.lists(TEXT | st.just(b"\n") | st.just(b"\r\n"), max_size=30))
def test_output_without_bars_is_unchanged(pieces):
    progress, shown = ProgressLines(), b""
    for number, piece in enumerate(pieces):
        shown += progress.feed(piece, number)
    assert shown == b"".join(pieces)


@given(st.lists(st.lists(st.sampled_from(["a", "bü", "漢字", ""]), min_size=1), min_size=1),
       st.integers(1, 7))  # fmt: skip
def test_the_last_state_of_each_line_is_shown_for_pieces_of_any_size(lines, size):
    text = "".join("\r".join(states) + "\n" for states in lines).encode()
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    shown = lines_of([(piece, 0.0) for piece in pieces])
    last = [next((state for state in reversed(states) if state), "") for states in lines]
    found = iter(shown)
    assert all(state in found for state in last if state)


def test_a_bar_is_two_tagged_lines_in_a_file_and_one_line_on_a_terminal():
    for is_terminal in (False, True):
        written = bytearray()
        screen = Screen(written.extend, is_terminal=is_terminal)
        bar, other = make_stream(0, "stderr"), make_stream(1, "stderr")
        for percent in range(101):
            screen.feed(bar, b"\r%d%%" % percent)
            if percent == 50:
                screen.feed(other, b"hello\n")
        screen.finish(bar)
        if is_terminal:
            assert written.count(b"\n") == 2
        else:
            assert written.decode().splitlines() == [
                "[1,0]<stderr>:0%", "[1,1]<stderr>:hello", "[1,0]<stderr>:100%",
            ]  # fmt: skip


def test_a_bar_without_new_output_appears_in_a_file():
    written = bytearray()
    screen, bar = Screen(written.extend), make_stream(0, "stderr")
    screen.feed(bar, b"\r 1%")
    assert written == b""
    assert screen.next_bar_at() == bar.fed_at
    screen.flush_idle(bar.fed_at + 0.1)
    assert written == b"[1,0]<stderr>: 1%\n"
    assert screen.next_bar_at() == float("inf")


def test_plain_output_has_the_unchanged_bytes_of_the_program():
    written = bytearray()
    screen, bar = Screen(written.extend), make_stream(0, "stderr", form="plain")
    for data in (b"\r 1%", b"\r 2%", b"\n"):
        screen.feed(bar, data)
    assert written == b"\r 1%\r 2%\n"


def test_an_endless_redrawn_line_is_passed_on():
    progress = ProgressLines()
    assert progress.feed(b"\r" + b"x" * 70_000, 0.0) == b"x" * 70_000
