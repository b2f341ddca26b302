"""Text on a stream that does not take it: it is lost, and nothing else changes."""

from __future__ import annotations

import io
import os
import sys

import pytest

from poprun_py import terminal
from poprun_py.terminal import Terminal, UnwritableError


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
    console = Terminal(is_verbose=True, prints_bindings=False)
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
        Terminal(is_verbose=False, prints_bindings=True).binding("CPUs 0-3")
        assert terminal.exit_code_of(lambda: 9) == 9
        told = "cannot be written: No space left on device" in capsys.readouterr().err
        assert told == (make is full)  # the reader of a closed pipe wanted no more
        sys.stdout = stream
        with pytest.raises(UnwritableError):
            terminal.flush_stdout()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
