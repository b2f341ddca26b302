"""Text on a stream that does not take it: it is lost, and nothing else changes."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import termios

import pytest
from support.terminals import screen_of

from poprun_py import terminal
from poprun_py.errors import UnwritableError
from poprun_py.terminal import Console, exit_code_of, prepare_streams


def full():
    return open("/dev/full", "w")  # noqa: PTH123


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def closed_file():
    file = io.StringIO()
    file.close()
    return file


@pytest.fixture(params=[full, closed_pipe, closed_file, lambda: None])
def unwritable(request):
    stream = request.param()
    yield stream
    if stream is not None and not stream.closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.close()


def test_an_error_of_stderr_reaches_no_caller(unwritable, monkeypatch):
    monkeypatch.setattr(sys, "stderr", unwritable)
    console = Console(is_verbose=True, prints_bindings=False)
    for say in (
        terminal.print_error, terminal.print_problem, terminal.print_warning,
        terminal.rewrite_line, console.log, console.warn, console.tell, console.binding,
    ):  # fmt: skip
        say("x" * 100_000)
    assert terminal.exit_code_of(lambda: 9) == 9


@pytest.mark.parametrize("make", [full, closed_pipe])
def test_before_a_job_stdout_may_be_lost(make, monkeypatch, capsys):
    with make() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with terminal.may_be_lost():
            terminal.print_out("the topology")
        Console(is_verbose=False, prints_bindings=True).binding("CPUs 0-3")
        assert terminal.exit_code_of(lambda: 9) == 9
        told = "cannot be written: No space left on device" in capsys.readouterr().err
        assert told == (make is full)  # the reader of a closed pipe wanted no more
        sys.stdout = stream
        with pytest.raises(UnwritableError):
            terminal.flush_stdout()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_waiting_is_told_again_only_for_another_reason(capsys):
    console = Console(is_verbose=False, prints_bindings=False)
    for seconds, reason in ((0, "for a"), (1, "for a"), (2, "for b"), (3, "for a"), (4, "")):
        console.waiting(seconds, reason)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "waiting for a", "waiting for b", "waiting for a"
    ]  # fmt: skip


def test_on_a_terminal_waiting_is_one_line_that_is_cleared(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "can_rewrite_lines", lambda: True)
    console = Console(is_verbose=False, prints_bindings=False)
    for seconds, reason in ((0, "for a"), (1.2, "for a"), (2, "")):
        console.waiting(seconds, reason)
    written = capsys.readouterr().err
    assert "\n" not in written
    assert [row.partition("waiting ")[2] for row in written.split("\r\x1b[J")[1:]] == [
        "0 s for a\r", "1 s for a\r", ""
    ]  # fmt: skip


@pytest.mark.parametrize("wraps_anew", [True, False])
def test_waiting_leaves_no_rows_when_the_terminal_is_resized(capsys, monkeypatch, wraps_anew):
    monkeypatch.setattr(terminal, "can_rewrite_lines", lambda: True)
    console = Console(is_verbose=False, prints_bindings=False)
    written, resizes = "$ poprun-py\r\n", []
    for columns in (60, 20, 9, 30, 80):
        resizes.append((len(written), columns))
        monkeypatch.setattr(terminal, "columns_of", lambda _, columns=columns: columns)
        console.waiting(columns, "for IPUs: the run 訓練 has 16 of 16, of pod p16")
        written += capsys.readouterr().err

    def screen():
        return screen_of(written, columns=60, rows=9, resizes=resizes, wraps_anew=wraps_anew)

    command = ["$ poprun-py"] if wraps_anew else ["$ poprun-"]
    text = "poprun-py: waiting 80 s for IPUs: the run 訓練 has 16 of 16, of pod p16"
    assert screen() == [*command, text]
    console.waiting(81, "")
    written += capsys.readouterr().err
    assert screen() == command


def test_a_message_while_the_job_waits_replaces_the_row_on_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "can_rewrite_lines", lambda: True)
    console = Console(is_verbose=True, prints_bindings=False)
    for show in (console.log, console.warn, console.tell, console.binding):
        console.waiting(1, "for a")
        show("a message")
        assert re.search(r"for a\r\r\x1b\[J[^\r]*a message\n$", capsys.readouterr().err)
    console.waiting(2, "")
    console.log("later")
    assert capsys.readouterr().err.count("\r") == 1


LONG = "the folder /a/b has no room, so that the output of these instances is not kept"


def on_a_terminal(columns, **variables):
    """Return what print_warning writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with os.fdopen(theirs, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setenv("TERM", variables.get("TERM", "xterm"))
        terminal.print_warning(LONG)
        terminal.print_error("a table   " * 10)
    written = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as reader:
        while data := reader.read(1 << 16):
            written += data
    return written.decode().replace("\r\n", "\n")


def test_messages_are_wrapped_at_words_on_a_terminal_only(capsys):
    terminal.print_warning(LONG)
    line = f"poprun-py: warning: {LONG}\n"
    assert capsys.readouterr().err == line
    table = "a table   " * 10 + "\n"
    assert on_a_terminal(200) == on_a_terminal(40, TERM="dumb") == line + table
    assert on_a_terminal(0) == line + table  # a terminal that does not know its size
    assert on_a_terminal(40) == (
        "poprun-py: warning: the folder /a/b has\n"
        "  no room, so that the output of these\n"
        "  instances is not kept\n" + table
    )


def test_a_missing_package_is_an_error_of_one_line(capsys):
    def command():
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")

    assert exit_code_of(command) == 3
    assert capsys.readouterr().err.endswith(
        "an HTML page needs the package jinja2, which is not installed: pip install jinja2\n"
    )


def test_a_missing_module_of_a_program_keeps_its_traceback():
    def command():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    with pytest.raises(ModuleNotFoundError, match="mine"):
        exit_code_of(command)


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_can_be_asked_for_its_terminal(name, monkeypatch):
    for each in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, each, None if each == name else getattr(sys, each))
    prepare_streams()
    assert isinstance(getattr(sys, name).isatty(), bool)
