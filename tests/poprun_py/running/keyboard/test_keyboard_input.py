"""Modes of terminals, the queue of debuggers, Ctrl-Z, and input from a file."""

from __future__ import annotations

import json
import os
import selectors
import termios
from dataclasses import astuple, replace

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.instance import control_protocol
from poprun_py.running.keyboard.keyboard_input import KeyboardInput, Suspension
from poprun_py.running.keyboard.user_terminal import Modes, window

BITS = st.integers(0, 2**17 - 1)
MODES = st.builds(
    Modes, BITS, BITS, BITS, st.lists(st.integers(0, 255), min_size=32, max_size=32).map(tuple)
)
COOKED = Modes(
    termios.ICRNL | termios.IXON,
    termios.OPOST | termios.ONLCR,
    termios.ICANON | termios.ECHO | termios.ISIG,
    (0,) * 32,
)


@given(MODES, MODES)
def test_a_program_that_restores_its_terminal_leaves_the_users_terminal_unchanged(own, first):
    kept = own.with_changes(first, first)
    if own.is_canonical:
        assert kept == own
    else:
        assert replace(kept, codes=own.codes) == own


@given(MODES)
def test_equal_terminals_stay_equal(theirs):
    changed = COOKED.with_changes(COOKED, theirs)
    assert (changed.iflag, changed.oflag, changed.lflag) == (
        theirs.iflag,
        theirs.oflag,
        theirs.lflag,
    )


def test_modes_of_the_user_stay_if_the_program_changes_other_modes():
    own = replace(COOKED, iflag=COOKED.iflag | termios.IXANY, lflag=COOKED.lflag & ~termios.ECHO)
    without_lines = replace(COOKED, lflag=COOKED.lflag & ~termios.ICANON)
    changed = own.with_changes(COOKED, without_lines)
    assert changed.iflag & termios.IXANY
    assert not changed.lflag & (termios.ECHO | termios.ICANON)
    # The launcher reads every key at once, whatever the program waits for.
    assert (changed.codes[termios.VMIN], changed.codes[termios.VTIME]) == (1, 0)


def test_the_modes_of_a_shell_that_edits_its_command_line_become_sane():
    edited = Modes(0, 0, termios.ISIG, (1,) * 32)
    assert edited.sane().is_canonical
    assert edited.sane().echoes_newline
    assert edited.sane().maps_newlines
    assert edited.sane().codes == edited.codes


def test_modes_survive_termios_and_json():
    attributes = [COOKED.iflag, COOKED.oflag, 99, COOKED.lflag, 15, 15, [b"\0"] * 32]
    assert Modes.of(attributes) == COOKED
    assert COOKED.put_into(attributes) == attributes
    iflag, oflag, lflag, codes = json.loads(json.dumps(astuple(COOKED)))
    assert Modes(iflag, oflag, lflag, tuple(codes)) == COOKED


def test_a_window_is_narrower_by_the_tag_but_has_some_columns():
    assert window((24, 80), 14) == [24, 66]
    assert window((24, 80), 0) == [24, 80]
    assert window((24, 25), 14) == [24, 20]
    assert window((0, 0), 14) == [0, 0]


def test_the_launcher_stops_after_the_programs():
    stops = []
    suspension = Suspension(lambda: stops.append(1))
    suspension.on_time(0.0)
    assert suspension.next_deadline() == float("inf")
    suspension.begin([0, 1], 10.0)
    assert suspension.is_asked
    suspension.stopped(1)
    suspension.on_time(10.1)
    assert not stops
    suspension.stopped(0)
    assert suspension.next_deadline() <= 10.1
    suspension.on_time(10.1)
    assert stops == [1]
    assert not suspension.is_asked


def test_the_launcher_stops_even_if_a_host_does_not_answer():
    stops = []
    suspension = Suspension(lambda: stops.append(1))
    suspension.begin([0], 10.0)
    assert suspension.next_deadline() == 11.0
    suspension.on_time(11.0)
    assert stops == [1]


class Connections:
    """Keeps the frames that are sent. It also stands in for the output of the instances."""

    def __init__(self):
        self.sent = []
        self.owners = []

    def send_to(self, instance, kind, value):
        pass

    def send_bytes_to(self, instance, kind, payload):
        self.sent.append((instance, kind, payload))

    def broadcast(self, kind, value):
        self.sent.append((kind, value))

    def give_keyboard(self, instance, *, shows_hidden):
        self.owners.append(instance)

    def map_newlines(self, mapped):
        pass


class BackgroundTerminal:
    """A terminal that the launcher may not use now."""

    first_modes = modes = COOKED

    def may_use(self):
        return False

    def follow(self, modes, *, drop_input=False):
        pass

    def window(self, tag_width):
        return [24, 80 - tag_width]


def test_debuggers_get_the_keyboard_one_after_another():
    told, sent_to = [], Connections()
    terminal = BackgroundTerminal()
    keyboard = KeyboardInput(
        3, sent_to, sent_to, told.append, terminal=terminal, is_passed_on=False
    )
    with selectors.DefaultSelector() as selector:
        keyboard.begin(selector)
        for instance, event in ((2, "enter"), (0, "enter"), (1, "leave"), (2, "leave")):
            keyboard.received(instance, control_protocol.DEBUGGER, (event, 1))
        assert keyboard.is_debugging
        keyboard.ended(0)
    assert not keyboard.is_debugging
    assert sent_to.owners == [3, 2, 0, 3]
    assert told == [2, 0, None]
    assert sent_to.sent == [(control_protocol.DEBUGGER_LEFT, 1)] * 2


def test_the_next_reader_of_a_file_gets_the_rest_of_an_input_for_another_host(tmp_path):
    (tmp_path / "lines").write_text("one\ntwo\n")
    keyboard = KeyboardInput(
        1, sent_to := Connections(), sent_to, print, terminal=None, is_passed_on=True
    )
    before = os.dup(0)
    try:
        with selectors.DefaultSelector() as selector, (tmp_path / "lines").open() as file:
            os.dup2(file.fileno(), 0)
            keyboard.begin(selector)
            assert sent_to.sent == [(1, control_protocol.KEYS, b"one\ntwo\n")]
            keyboard.received(1, control_protocol.UNREAD, 4)
            assert os.read(0, 100) == b"two\n"
    finally:
        os.dup2(before, 0)
        os.close(before)
