"""The class Screen, which merges the lines of instances, and Sink, which writes to descriptors."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.screen.tagged_output import MAX_HELD, Screen, Sink, keep_end, make_stream


class Written:
    def __init__(self, is_terminal=False, **options):
        self.data = b""
        self.screen = Screen(self._take, is_terminal=is_terminal, **options)

    def _take(self, data):
        self.data += data


def tagged(index, name="stdout"):
    return make_stream(index, name)


def test_lines_are_tagged_as_poprun_does():
    written = Written()
    written.screen.feed(tagged(3), b"one\ntwo\n")
    assert written.data == b"[1,3]<stdout>:one\n[1,3]<stdout>:two\n"


def test_character_in_two_reads_stays_whole():
    written, stream = Written(), tagged(0)
    line = "naïve – ünïcode 漢字\n".encode()
    for position in range(len(line)):
        written.screen.feed(stream, line[position : position + 1])
    assert written.data == b"[1,0]<stdout>:" + line


@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=40)), max_size=40),
    st.booleans(),
)
def test_no_line_is_lost_and_every_instance_keeps_its_order(pieces, plain):
    written = Written()
    form = "plain" if plain else "tag"
    streams = [make_stream(i, "stdout", form=form) for i in range(3)]
    sent = [b"", b"", b""]
    for index, data in pieces:
        data = data.replace(b"\r", b".").replace(b"<", b".")
        sent[index] += data
        written.screen.feed(streams[index], data)
    for stream in streams:
        written.screen.finish(stream)
    if plain:
        lines = sorted(line for text in sent for line in lines_of(text))
        assert sorted(lines_of(written.data)) == lines
        return
    got = [[], [], []]
    for line in lines_of(written.data):
        assert line.startswith(b"[1,")
        got[int(line[3:4])].append(line.partition(b">:")[2])
    assert got == [lines_of(text) for text in sent]


def lines_of(data):
    return data.removesuffix(b"\n").split(b"\n") if data else []


def test_progress_bar_stays_one_line_on_a_terminal():
    written, bar, other = Written(is_terminal=True), tagged(0, "stderr"), tagged(1, "stderr")
    for percent in (10, 20):
        written.screen.feed(bar, b"\r %d%%" % percent)
    written.screen.feed(other, b"hello\n")
    written.screen.feed(bar, b"\r 30%")
    written.screen.feed(bar, b"\n")
    assert visible(written.data) == ["[1,1]<stderr>:hello", "[1,0]<stderr>: 30%"]


def test_an_open_line_is_written_again_if_the_terminal_cannot_erase():
    written, prompt, other = Written(is_terminal=True, can_erase=False), tagged(0), tagged(1)
    written.screen.feed(prompt, b"name? ")
    written.screen.flush_idle(prompt.fed_at + 1)
    written.screen.feed(other, b"hello\n")
    written.screen.insert(b"summary")
    written.screen.feed(prompt, b"yes\n")
    assert written.data.split(b"\n") == [
        b"[1,0]<stdout>:name? ", b"[1,1]<stdout>:hello",
        b"[1,0]<stdout>:name? ", b"summary",
        b"[1,0]<stdout>:name? yes", b"",
    ]  # fmt: skip


def test_second_progress_bar_waits_for_the_first():
    written, first, second = Written(is_terminal=True), tagged(0), tagged(1)
    for percent in range(100):
        written.screen.feed(first, b"\r%d%%" % percent)
        written.screen.feed(second, b"\r%d%%" % percent)
    written.screen.finish(first)
    written.screen.finish(second)
    assert written.data.count(b"\n") == 2
    assert visible(written.data) == ["[1,0]<stdout>:99%", "[1,1]<stdout>:99%"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_output_after_an_ended_bar_is_a_line_of_its_own(is_terminal):
    written, bar, other = Written(is_terminal), tagged(0, "stderr"), tagged(1, "stderr")
    for stream in (bar, other):
        written.screen.feed(stream, b"\r 1%")
        written.screen.feed(stream, b"\r 20%")
        written.screen.end_bar(stream)
        written.screen.feed(stream, b"Traceback:\n")
    shown = visible(written.data)
    assert [line for line in shown if not line.endswith(" 1%")] == [
        "[1,0]<stderr>: 20%", "[1,0]<stderr>:Traceback:",
        "[1,1]<stderr>: 20%", "[1,1]<stderr>:Traceback:",
    ]  # fmt: skip
    # An unfinished line that is not a bar is not ended.
    written.screen.feed(bar, b"ERROR: ")
    written.screen.flush_idle(bar.fed_at + 1)
    written.screen.end_bar(bar)
    written.screen.feed(bar, b"Traceback:\n")
    assert visible(written.data)[-1] == "[1,0]<stderr>:ERROR: Traceback:"


def visible(data):
    """Return the lines that a terminal shows, which handles carriage returns and ESC [K."""
    shown = []
    for line in data.decode().removesuffix("\n").split("\n"):
        text = ""
        for part in line.split("\r"):
            part = part.removeprefix("\x1b[K") if part.startswith("\x1b[K") else part
            text = part if part else text
        shown.append(text)
    return shown


def test_a_carriage_return_before_a_newline_is_not_a_progress_bar():
    written, stream = Written(), tagged(0)
    written.screen.feed(stream, b"one\r")
    written.screen.feed(stream, b"\ntwo\r\n")
    assert written.data == b"[1,0]<stdout>:one\r\n[1,0]<stdout>:two\r\n"


def test_a_prompt_is_shown_after_a_pause():
    written, stream = Written(), tagged(0)
    written.screen.feed(stream, b"name? ")
    assert written.data == b""
    written.screen.flush_idle(stream.fed_at + 1)
    assert written.data == b"[1,0]<stdout>:name? "
    written.screen.feed(stream, b"Ada\n")
    assert written.data == b"[1,0]<stdout>:name? Ada\n"


def test_an_endless_line_is_passed_on_in_pieces():
    written, stream = Written(), tagged(0)
    for _ in range(3 * MAX_HELD // (1 << 20)):
        written.screen.feed(stream, b"x" * (1 << 20))
        assert len(stream.held) <= MAX_HELD + (1 << 20)
    written.screen.finish(stream)
    assert written.data.count(b"x") == 3 * MAX_HELD
    assert written.data.count(b"\n") == 1


def test_the_end_of_a_stream_keeps_both_ends_of_a_long_line():
    kept, piece = bytearray(), b"x" * 65536
    for data in (b"Traceback:\nValueError: ", *[piece] * 9, b"end\n", b"short\n"):
        kept = keep_end(kept, data)
    lines = bytes(kept).split(b"\n")
    assert lines[0] == b"Traceback:"
    assert lines[1].startswith(b"ValueError: xxx")
    assert lines[1].endswith(b"xxxend")
    assert len(lines[1]) < 3000
    assert lines[2:] == [b"short", b""]
    for _ in range(9):
        kept = keep_end(kept, b"y" * 99 + b"\n" + (b"z" * 99 + b"\n") * 655)
    assert len(kept) == 1 << 15


def test_forms():
    assert make_stream(0, "stderr", form="plain").prefix() == b""
    assert make_stream(0, "stderr", colour=True).prefix() == b"\x1b[32m[1,0]<stderr>:\x1b[0m"
    clock, _, tag = make_stream(0, "stdout", form="time").prefix().partition(b" ")
    assert len(clock) == len("12:34:56.789")
    assert tag == b"[1,0]<stdout>:"


# --- sinks ------------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_sink_never_blocks_and_loses_nothing(pipe):
    read, write = pipe
    sink = Sink(write)
    data = os.urandom(1 << 20)
    sink.write(data)
    assert 0 < sink.pending < len(data)
    got = b""
    while sink.pending:
        got += os.read(read, 1 << 16)
        sink.flush()
    while len(got) < len(data):
        got += os.read(read, 1 << 16)
    assert got == data


def test_sink_is_full_if_its_reader_takes_nothing(pipe):
    sink = Sink(pipe[1])
    assert not sink.is_full
    sink.write(b"x" * (5 << 20))
    assert sink.is_full


def test_sink_survives_a_reader_that_goes_away(pipe):
    read, write = pipe
    sink = Sink(write)
    os.close(read)
    sink.write(b"this is lost")
    sink.write(b"this too")
    assert sink.pending == 0


def test_sink_writes_files_at_once(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        sink = Sink(file.fileno())
        sink.write(b"x" * (1 << 20))
        assert sink.pending == 0


def live(index=0, form="tag"):
    stream = make_stream(index, "stdout", form=form)
    stream.live = True
    return stream


def test_a_live_prompt_is_shown_at_once():
    written, stream = Written(is_terminal=True), live()
    written.screen.feed(stream, b"name? ")
    assert written.data == b"[1,0]<stdout>:name? "
    # The terminal itself echoes typed text and the Enter key.
    written.screen.end_by_terminal()
    written.screen.feed(stream, b"hello\n")
    assert written.data == b"[1,0]<stdout>:name? [1,0]<stdout>:hello\n"


def test_a_prompt_is_shown_again_below_lines_of_other_instances():
    written, stream = Written(is_terminal=True), live()
    written.screen.feed(stream, b"(Pdb) p")
    written.screen.feed(tagged(1), b"a line\n")
    assert visible(written.data) == ["[1,1]<stdout>:a line", "[1,0]<stdout>:(Pdb) p"]
    written.data = b""
    written.screen.redraw()
    assert written.data == b"[1,0]<stdout>:(Pdb) p"


def test_a_live_prompt_ends_an_open_progress_bar():
    written, bar = Written(is_terminal=True), tagged(1)
    written.screen.feed(bar, b"\r50%")
    written.screen.feed(live(), b"? ")
    assert written.data.endswith(b"50%\n[1,0]<stdout>:? ")


def test_every_byte_of_a_full_screen_program_is_passed_on():
    written, stream = Written(is_terminal=True), live(form="plain")
    parts = [b"\x1b[H\x1b[2J\r", b"\r", b"\n", b"text\r\x1b[5C", b"more\r\n", b"end\r"]
    for part in parts:
        written.screen.feed(stream, part)
    assert written.data == b"".join(parts)


def test_lines_of_other_instances_begin_in_the_first_column_of_a_raw_terminal():
    written, stream = Written(is_terminal=True), live()
    written.screen.maps_newlines = False
    written.screen.feed(stream, b"raw\r\n")
    written.screen.feed(tagged(1), b"a\nb\n")
    assert written.data == b"[1,0]<stdout>:raw\r\n[1,1]<stdout>:a\r\n[1,1]<stdout>:b\r\n"


def test_a_line_of_the_launcher_keeps_a_prompt_open_on_a_terminal():
    written, stream = Written(is_terminal=True), tagged(1)
    stream.live = True
    written.screen.feed(stream, b"(Pdb) ")
    written.data = b""
    written.screen.insert(b"poprun-py: said")
    assert written.data == b"\r\x1b[Kpoprun-py: said\n[1,1]<stdout>:(Pdb) "
    written.screen.feed(stream, b"next\n")
    assert written.data.endswith(b"(Pdb) next\n")


def test_a_line_of_the_launcher_ends_an_open_line_in_a_file():
    written, stream = Written(), tagged(1)
    written.screen.feed(stream, b"not yet")
    written.screen.flush_idle(stream.fed_at + 1)
    written.screen.insert(b"poprun-py: said")
    assert written.data == b"[1,1]<stdout>:not yet\npoprun-py: said\n"


def plain(index=0, name="stdout"):
    return make_stream(index, name, form="plain")


@given(
    st.lists(st.one_of(st.binary(max_size=9), st.sampled_from([b"\r", b"\n", b"\r\n", b"idle"])))
)
def test_a_plain_stream_is_unchanged(pieces):
    written, stream = Written(), plain()
    for piece in pieces:
        if piece == b"idle":
            written.screen.flush_idle(float("inf"))
        else:
            written.screen.feed(stream, piece)
    written.screen.finish(stream)
    written.screen.finish(stream)
    assert written.data == b"".join(piece for piece in pieces if piece != b"idle")


def test_an_unfinished_plain_line_is_ended_before_other_output():
    written, one, other = Written(), plain(0), plain(1)
    written.screen.feed(one, b"one")
    written.screen.finish(one)
    written.screen.feed(other, b"other")
    assert written.data == b"one"
    written.screen.flush_idle(float("inf"))
    assert written.data == b"one\nother"
    written.screen.finish(other)
    written.screen.insert(b"poprun-py: a warning")
    assert written.data == b"one\nother\npoprun-py: a warning\n"
