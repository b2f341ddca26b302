"""The panel stays below the output and does not disturb it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.terminals import screen_of

from poprun_py.running.screen import panel as panel_module
from poprun_py.running.screen.panel import Panel

COLUMNS, ROWS = 20, 8
LINES = ("one", "two")


class Written:
    """A panel with the stream that it wrote, and the same output without a panel."""

    def __init__(self):
        self.stream = self.plain = b""
        self.size = (COLUMNS, ROWS)
        self.after_writes = []
        self.panel = Panel(self._take, lambda: self.size)
        self.now = 100.0

    def _take(self, data):
        self.stream += data
        self.after_writes.append(self.screen)

    def monotonic(self):
        return self.now

    def output(self, text):
        self.plain += text.encode()
        self.panel.write(text.encode())

    def wait(self):
        self.now += 1
        self.panel.on_time(self.now)

    @property
    def screen(self):
        return screen_of(self.stream.decode(), columns=COLUMNS, rows=ROWS)

    @property
    def screen_without(self):
        return screen_of(self.plain.decode(), columns=COLUMNS, rows=ROWS)


@pytest.fixture
def written(monkeypatch):
    written = Written()
    monkeypatch.setattr(panel_module, "time", written)
    return written


def test_the_panel_stays_below_new_lines(written):
    written.panel.show(LINES)
    for number in range(3):
        written.output(f"line {number}\r\n")
        written.wait()
    assert written.screen == ["line 0", "line 1", "line 2", "", *LINES]


def test_the_panel_stays_at_the_bottom_when_the_output_scrolls(written):
    written.panel.show(LINES)
    for number in range(12):
        written.output(f"line {number}\r\n")
        written.wait()
    assert written.screen == [*(f"line {n}" for n in range(12)), "", *LINES]


def test_an_unfinished_line_continues_in_place(written):
    written.panel.show(LINES)
    written.output("prompt> ")
    written.wait()
    assert written.screen == ["prompt>", *LINES]
    written.output("answer")
    written.wait()
    assert written.screen == ["prompt> answer", *LINES]


def test_a_progress_bar_is_redrawn_above_the_panel(written):
    written.panel.show(LINES)
    for part in ("\r10 %", "\r20 %", "\r30 %"):
        written.output(part)
        written.wait()
    assert written.screen == ["30 %", *LINES]


def test_the_panel_is_not_drawn_again_with_each_piece_of_output(written):
    written.panel.show(LINES)
    written.stream = b""
    for _ in range(100):
        written.output("x")
    assert b"one" not in written.stream
    assert written.panel.next_deadline() == pytest.approx(100.1)
    written.wait()
    assert written.stream.count(b"one") == 1


def test_the_panel_is_visible_after_every_write(written):
    written.panel.show(LINES)
    for part in ("\r10 %", "\r20 %", "\r\n", *("line\r\n" * 200).split("l"), "prompt> "):
        written.output(part)
        written.now += 0.01
        written.panel.on_time(written.now)
    written.wait()
    assert len(written.after_writes) > 10
    assert all(screen[-2:] == list(LINES) for screen in written.after_writes)
    assert written.screen[-3:] == ["prompt>", *LINES]


def test_a_large_output_is_written_at_once(written):
    written.panel.show(LINES)
    written.output("x" * 20_000)
    assert written.stream.count(b"x") == 20_000


def test_the_panel_is_not_drawn_on_a_terminal_that_does_not_keep_up(written):
    is_ready = False
    panel = Panel(written._take, lambda: written.size, lambda: is_ready)
    panel.show(LINES)
    written.stream = b""
    panel.write(b"line\r\n")
    written.now += 10
    panel.on_time(written.now)
    assert written.stream == b""
    is_ready = True
    panel.on_time(written.now)
    assert b"line" in written.stream


def test_an_unfinished_line_stays_in_the_last_row_of_a_window_made_lower(written):
    written.panel.show(LINES)
    written.stream = b""
    written.panel.show(())
    shown = "\n" * (ROWS - 1) + "prompt> " + written.stream.decode() + "answer"
    assert screen_of(shown, columns=COLUMNS, rows=ROWS)[-1] == "prompt> answer"


def test_lines_made_for_another_size_are_not_drawn_again(written):
    written.panel.show(LINES)
    written.size = (COLUMNS - 5, ROWS)
    written.output("line\r\n")
    written.wait()
    assert written.screen == ["line"]
    written.panel.show(LINES)
    assert written.screen == ["line", "", *LINES]


def test_an_empty_sequence_removes_the_panel(written):
    written.output("line\r\n")
    written.panel.show(LINES)
    written.panel.show(())
    assert written.screen == ["line"]
    assert written.panel.next_deadline() == float("inf")


def test_an_echoed_enter_key_leaves_no_remains_of_the_panel(written):
    written.panel.show(LINES)
    written.output("prompt> ")
    written.wait()
    written.stream += b"y\r\n"  # the terminal's echo
    written.panel.enter_typed()
    written.output("z\r\n")
    written.wait()
    assert written.screen == ["prompt> y", "z", "", *LINES]


@given(
    st.lists(
        st.one_of(
            st.text("ab \r", max_size=30),
            st.just("\r\n"),
            st.just("wait"),
            st.lists(st.text("xy", min_size=1, max_size=9), max_size=4),
        ),
        max_size=20,
    )
)
def test_the_output_is_the_same_with_and_without_a_panel(actions):
    written = Written()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panel_module, "time", written)
        for action in actions:
            if action == "wait":
                written.wait()
            elif isinstance(action, list):
                written.panel.show(action)
            else:
                written.output(action)
        written.panel.show(())
    # The output with a panel may have scrolled earlier, so empty lines are ignored.
    assert [line for line in written.screen if line] == [
        line for line in written.screen_without if line
    ]
