"""Progress bars fit into the terminal, also after it has got another size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.terminals import screen_of

from poprun_py.running.screen.bar_row import fitted, next_state, stays_in_row
from poprun_py.running.screen.panel import Panel
from poprun_py.running.screen.tagged_output import Screen, make_stream

TAG = "[1,0]<stderr>:"


def tqdm_bar(percent, meter=40):
    """Return a bar as tqdm draws it."""
    full = "█" * (meter * percent // 100)
    return f"\r{percent:3}%|{full:<{meter}}| {percent}/100 [00:01<00:01, 40.1it/s]"


class Shown:
    """A screen on a terminal, with the stream that it wrote and the resizes."""

    def __init__(self, columns=80, *, has_panel=False, live=False):
        self.stream, self.first, self.columns, self.resizes = "", columns, columns, []
        self.panel = Panel(self._take, lambda: (self.columns, 12))
        write = self.panel.write if has_panel else self._take
        self.screen = Screen(write, is_terminal=True, columns=lambda: self.columns)
        self.has_panel = has_panel
        self.bar, self.other = make_stream(0, "stderr"), make_stream(1, "stderr")
        self.bar.live = live

    def _take(self, data):
        self.stream += data.decode().replace("\n", "\r\n")  # as the kernel does

    def feed(self, text, stream=None):
        self.screen.feed(stream or self.bar, text.encode())

    def resize(self, columns):
        self.resizes.append((len(self.stream), columns))
        self.columns = columns
        self.screen.resized()
        if self.has_panel:
            self.panel.show(["-" * (columns - 1), "-" * (columns - 1)])

    def lines(self, *, wraps_anew):
        return screen_of(
            self.stream, columns=self.first, rows=12, resizes=self.resizes, wraps_anew=wraps_anew
        )


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("has_panel", [False, True])
@pytest.mark.parametrize("wraps_anew", [True, False])
def test_a_full_bar_survives_other_sizes_of_the_terminal(wraps_anew, has_panel, live):
    shown = Shown(90, has_panel=has_panel, live=live)
    shown.feed("before\n", shown.other)
    shown.feed(tqdm_bar(10))
    for percent, columns in enumerate((90, 60, 45, 30, 100, 62, 40), 20):
        shown.resize(columns)
        shown.feed(tqdm_bar(percent))
        shown.panel.draw()
        before, bar, *below = [line for line in shown.lines(wraps_anew=wraps_anew) if line]
        assert before == "[1,1]<stderr>:before"
        assert bar.startswith(f"{TAG} {percent}%|")
        assert below == (["-" * (columns - 1)] * 2 if has_panel else [])
        if columns >= 60:
            assert bar.endswith("it/s]")
    shown.feed("line\n", shown.other)
    shown.feed(tqdm_bar(100) + "\nafter\n")
    shown.panel.show(())
    assert [line.partition(">:")[2] for line in shown.lines(wraps_anew=wraps_anew) if line][:2] == [
        "before", "line",
    ]  # fmt: skip
    text = "".join(shown.lines(wraps_anew=wraps_anew))
    assert text.count("%|") == 1
    assert "100/100 [00:01<00:01, 40.1it/s]" in text
    assert text.endswith(f"{TAG}after")


@pytest.mark.parametrize("wraps_anew", [True, False])
def test_a_bar_that_stands_still_is_fitted_when_the_terminal_is_resized(wraps_anew):
    shown = Shown(90)
    shown.feed(tqdm_bar(50))
    shown.resize(60)
    (line,) = shown.lines(wraps_anew=wraps_anew)
    assert line == f"{TAG} 50%|█████    | 50/100 [00:01<00:01, 40.1it/s]"
    assert len(line) <= 60


def test_a_bar_that_was_held_is_shown_once_in_one_row():
    shown = Shown(60)
    shown.feed("\r open", shown.other)
    shown.feed(tqdm_bar(10) + tqdm_bar(30))
    shown.feed(tqdm_bar(100) + "\nafter\n")
    first, *rest = shown.lines(wraps_anew=True)
    assert first == f"{TAG}100%|████████| 100/100 [00:01<00:01, 40.1it/s]"
    assert rest == [f"{TAG}after", "[1,1]<stderr>: open"]


def test_a_bar_is_wider_in_a_wider_terminal_and_never_wrapped():
    state = tqdm_bar(50, 100).encode()[1:]
    for columns in range(1, 160):
        text = fitted(state, columns).decode()
        assert len(text) <= columns
        if 45 < columns < 130:
            meter = text.partition("|")[2].partition("|")[0]
            assert len(text) == columns
            assert abs(meter.count("█") - len(meter) / 2) <= 1
    assert fitted(state, 150) == state


def test_colours_and_wide_characters_are_measured_as_they_are_shown():
    state = "\x1b[32m漢字漢字\x1b[0m 10%".encode()
    assert fitted(state, 12) == state
    assert fitted(state, 5).decode() == "\x1b[32m漢字\x1b[0m"
    assert fitted(state, 5, is_last=True) == state
    assert fitted(b"\x1b[K 10%\r", 80) == b" 10%"


def test_a_shorter_state_leaves_the_end_of_the_longer_one():
    assert next_state(b"Working |", b"\rDone") == b"Doneing |"
    assert next_state(b"10%", b"\r") == b"10%\r"
    assert next_state(b"10%\r", b"20%") == b"20%"
    assert next_state(b"", b"\r5%\r6%\r\r7%") == b"7%"
    assert next_state(b"100%", b"\r\x1b[K5%") == b"\x1b[K5%"


@pytest.mark.parametrize(
    "text", ["\rname \x1b[3D", "\r50%\x1b[2A", "\r50%\b", "\r1%\t2", "\r\x1b[2;3H", "\r\x1b"]
)
def test_other_codes_are_written_as_they_are(text):
    assert not stays_in_row(text.encode())
    shown = Shown()
    shown.feed(text)
    assert shown.stream == TAG + text.replace("\r", f"\r{TAG}")
    shown.feed("\r60%")
    assert shown.stream.endswith(f"\r{TAG}60%")


def test_the_cursor_stays_where_the_user_types():
    shown = Shown(live=True)
    shown.feed("\rname? ")
    shown.feed("\rname? a")
    assert shown.stream == f"{TAG}\r{TAG}name? \r{TAG}name? a"
    shown.feed(f"\n{tqdm_bar(10, 10)}")
    assert shown.stream.endswith("it/s]\r")
    shown.feed("\x1b[A")  # the cursor is at the end of the bar again, as the program wrote it
    assert shown.stream.endswith("it/s]\x1b[A")


@pytest.mark.parametrize("is_first", [True, False])
def test_nested_bars_do_not_overwrite_lines_of_others(is_first):
    shown = Shown()
    if not is_first:
        shown.feed("\rfirst", shown.other)
    # tqdm writes each of these pieces at once.
    shown.feed("\router:   0%")
    for percent in (33, 67, 100):
        for piece in ("\n", "\rinner:   0%", "\x1b[A", "\n", "\r           \r", "\x1b[A"):
            shown.feed(piece)
        shown.feed(f"line {percent}\n", make_stream(2, "stdout"))
        shown.feed(f"\router: {percent:3}%")
    shown.feed("\nend\n")
    for stream in (shown.bar, shown.other):
        shown.screen.finish(stream)
    assert "\x1b[A" not in shown.stream
    lines = [line.partition(">:")[2] for line in shown.lines(wraps_anew=True)]
    for line in ("line 33", "line 67", "line 100", "outer: 100%", "end"):
        assert lines.count(line) == 1, lines
    assert lines.count("inner:   0%") <= 2


def test_a_shell_writes_behind_a_bar():
    shown = Shown()
    shown.feed(tqdm_bar(10, 10))
    shown.screen.suspend()
    shown.stream += "$\r\n"
    shown.screen.redraw()
    assert [line[-6:] for line in shown.lines(wraps_anew=True)] == ["it/s]$", "1it/s]"]


PARTS = st.sampled_from(
    [
        "\r 10%",
        "\r 2%",
        "\r" + "=" * 30,
        "\r\x1b[K",
        "done\n",
        "\n",
        "word",
        "\r",
        "漢\r",
        "\x1b[32m5",
    ]
)


@given(st.lists(st.tuples(PARTS, st.sampled_from([0, 0, 20, 33, 60])), max_size=20), st.booleans())
def test_every_whole_line_is_shown_whatever_the_sizes(steps, wraps_anew):
    shown, count = Shown(60), 0
    for text, columns in steps:
        if columns:
            shown.resize(columns)
        shown.feed(text)
        shown.feed(f"<{count:02}>\n", shown.other)
        count += 1
    # A narrow terminal breaks lines.
    found = "".join(shown.lines(wraps_anew=wraps_anew))
    assert [found.count(f"<{number:02}>") for number in range(count)] == [1] * count
