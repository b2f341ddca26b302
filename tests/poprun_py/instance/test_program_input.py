"""Input of a program that has ended, and invalid requests of its debugger."""

from __future__ import annotations

import errno
import json
import os
import termios

import pytest

from poprun_py.instance import control_protocol
from poprun_py.instance.program_input import ProgramInput, ProgramPipe, ProgramTerminal
from poprun_py.instance.program_process import ProgramOutput

_SETUP = {
    "modes": [termios.ICRNL, termios.OPOST | termios.ONLCR, termios.ICANON, [0] * 32],
    "size": [24, 80],
    "is_stdout": True,
    "is_stderr": False,
    "stream": control_protocol.STDOUT.decode(),
}


@pytest.fixture
def sent():
    return []


@pytest.mark.parametrize("keys", [b"", b"late\n"])
@pytest.mark.parametrize("kind", [ProgramTerminal, ProgramPipe])
def test_keys_after_the_end_of_the_program_are_dropped(kind, keys, sent):
    output = ProgramOutput(lambda *_: None)
    if kind is ProgramTerminal:
        typed = ProgramTerminal(_SETUP, lambda *frame: sent.append(frame), output.add)
    else:
        typed = ProgramPipe(lambda *frame: sent.append(frame))
    typed.ended()
    if kind is ProgramTerminal:
        read, write = os.pipe()
        os.set_blocking(read, False)
        [(descriptor, (terminal, _))] = output.sources.items()
        terminal.close()
        os.dup2(write, descriptor)  # the descriptor now belongs to another file
        typed.type(keys)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        for each in {read, write, descriptor}:
            os.close(each)
    else:
        typed.type(keys)
    unread = [(control_protocol.UNREAD, len(keys))] if kind is ProgramPipe and keys else []
    assert sent == [*unread, (control_protocol.KEYS_READ, None)]


@pytest.mark.parametrize("is_at_end", [False, True])
def test_unread_bytes_of_a_pipe_are_reported_when_the_program_ends(sent, is_at_end):
    pipe = ProgramPipe(lambda *frame: sent.append(frame))
    if child := os.fork():
        pipe.type(b"one\ntwo\n")
        if is_at_end:
            pipe.type(b"")
        os.waitpid(child, 0)
    else:
        pipe.become_stdin(1, 2)
        os.read(0, 4)
        os._exit(0)
    pipe.ended()
    assert sent[-1] == (control_protocol.UNREAD, 4)


@pytest.mark.parametrize(
    "writes",
    [
        ["line\n", "error"],
        ["error", "prompt"],
        ["line\n", "error", "prompt"],
        ["prompt", " goes on\n", "error"],
    ],
)
@pytest.mark.parametrize("num_read", range(4))
def test_lines_come_before_text_on_stderr_and_prompts_behind_it(writes, num_read):
    seen = []
    output = ProgramOutput(lambda _, data: seen.append(data.decode()))
    setup = {**_SETUP, "is_stderr": True}
    ProgramTerminal(setup, lambda *_: None, output.add)
    (out, _), (err, _) = output.sources.values()

    def write(text):
        os.write(err.slave if text == "error" else out.slave, text.encode())

    class Slow:
        """A terminal to which the program writes while the wrapper reads it."""

        def __init__(self, pty):
            self.pty = pty

        def read(self, size):
            data = self.pty.read(size)
            for text in writes[num_read:]:
                write(text)
            del writes[num_read:]
            return data

    output.sources = {
        descriptor: (Slow(source) if source is out else source, kind)
        for descriptor, (source, kind) in output.sources.items()
    }
    expected = "".join(writes)
    writes = list(writes)
    for text in writes[:num_read]:
        write(text)
    for _ in range(3):
        output.read(out.fileno())
    assert "".join(seen) == expected


class ProgressMemory:
    def lend_terminal(self, number):
        self.lent = number


@pytest.mark.parametrize("setup", [{}, {"input": _SETUP}, {"input": {}}])
def test_no_terminal_is_lent_after_the_end_of_the_program(sent, setup):
    memory, output = ProgressMemory(), ProgramOutput(lambda *_: None)
    program_input = ProgramInput(setup, memory, lambda *frame: sent.append(frame), output.add)
    program_input.ended()
    sources = dict(output.sources)
    payload = json.dumps(_SETUP).encode()
    program_input.handle(control_protocol.NEW_TERMINAL, payload)
    assert memory.lent == -errno.ENXIO
    assert output.sources == sources  # the wrapper would wait for the end of another terminal


def test_invalid_requests_are_ignored(sent):
    program_input = ProgramInput(
        {"debugger": True}, ProgressMemory(), lambda *frame: sent.append(frame), None
    )
    pipe = os.open(program_input.variables()["POPDIST_DEBUGGER"], os.O_WRONLY)
    os.write(pipe, b"\n\xff\xfe\nenter\nenter x\nwait 1\nsing 4\nenter 1\nwai")
    program_input.read_requests()
    os.write(pipe, b"t 2 0\nleave 1\n")
    program_input.read_requests()
    os.close(pipe)
    assert sent == [
        (control_protocol.DEBUGGER, ["enter", 1]),
        (control_protocol.DEBUGGER, ["wait", 2, 0]),
        (control_protocol.DEBUGGER, ["leave", 1]),
    ]
