"""What a program reads and asks for, where the program is gone or says nonsense."""

from __future__ import annotations

import os
import termios

import pytest

from poprun_py.instance import protocol
from poprun_py.instance.keyboard import Keyboard
from poprun_py.instance.program_input import ProgramPipe, ProgramTerminal

_SETUP = {
    "modes": [termios.ICRNL, termios.OPOST | termios.ONLCR, termios.ICANON, [0] * 32],
    "size": [24, 80],
    "is_stdout": True,
    "is_stderr": False,
    "stream": protocol.STDOUT.decode(),
}


@pytest.fixture
def sent():
    return []


@pytest.mark.parametrize("keys", [b"", b"late\n"])
@pytest.mark.parametrize("kind", [ProgramTerminal, ProgramPipe])
def test_keys_after_the_end_of_the_program_go_nowhere(kind, keys, sent):
    words = (_SETUP,) if kind is ProgramTerminal else ()
    typed = kind(*words, lambda *frame: sent.append(frame))
    typed.started()
    typed.ended()
    if kind is ProgramTerminal:
        read, write = os.pipe()
        os.set_blocking(read, False)
        typed.ptys[typed.master].close()
        os.dup2(write, typed.master)  # the number of the descriptor is another file's now
        typed.type(keys)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        for descriptor in {read, write, typed.master}:
            os.close(descriptor)
    else:
        typed.type(keys)
    assert sent == [(protocol.TAKEN, None)]


class Vitals:
    def lend_terminal(self, number):
        self.lent = number


def test_a_program_that_writes_nonsense_to_its_wrapper_is_not_heard(sent):
    keyboard = Keyboard({"debugger": True}, Vitals(), lambda *frame: sent.append(frame))
    pipe = os.open(keyboard.variables()["POPDIST_DEBUGGER"], os.O_WRONLY)
    os.write(pipe, b"\n\xff\xfe\nenter\nenter x\nwait 1\nsing 4\nenter 1\nwai")
    keyboard.read_requests()
    os.write(pipe, b"t 2 0\nleave 1\n")
    keyboard.read_requests()
    os.close(pipe)
    assert sent == [
        (protocol.DEBUG, ["enter", 1]),
        (protocol.DEBUG, ["wait", 2, 0]),
        (protocol.DEBUG, ["leave", 1]),
    ]
