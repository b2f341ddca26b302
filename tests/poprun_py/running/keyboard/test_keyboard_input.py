"""What the keyboard decides: modes of terminals, turns of debuggers, who has still to stop."""

from __future__ import annotations

import os
import selectors
import termios
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from poprun_py.instance import control_protocol
from poprun_py.running.keyboard.debug_turns import DebugTurns
from poprun_py.running.keyboard.keyboard_input import KeyboardInput
from poprun_py.running.keyboard.suspension import Suspension
from poprun_py.running.keyboard.terminal_modes import Modes, window

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
def test_a_program_that_sets_its_terminal_back_leaves_the_users_as_it_was(own, first):
    kept = own.changed_as(first, first)
    if own.is_canonical:
        assert kept == own
    else:
        assert replace(kept, codes=own.codes) == own


@given(MODES)
def test_equal_terminals_stay_equal(theirs):
    changed = COOKED.changed_as(COOKED, theirs)
    assert (changed.iflag, changed.oflag, changed.lflag) == (
        theirs.iflag,
        theirs.oflag,
        theirs.lflag,
    )


def test_what_the_user_set_stays_where_the_program_changes_something_else():
    own = replace(COOKED, iflag=COOKED.iflag | termios.IXANY, lflag=COOKED.lflag & ~termios.ECHO)
    without_lines = replace(COOKED, lflag=COOKED.lflag & ~termios.ICANON)
    changed = own.changed_as(COOKED, without_lines)
    assert changed.iflag & termios.IXANY
    assert not changed.lflag & (termios.ECHO | termios.ICANON)
    # The launcher is to get every key, whatever the program waits for.
    assert (changed.codes[termios.VMIN], changed.codes[termios.VTIME]) == (1, 0)


def test_a_terminal_whose_line_a_shell_edits_counts_as_one_of_lines():
    edited = Modes(0, 0, termios.ISIG, (1,) * 32)
    assert edited.sane().is_canonical
    assert edited.sane().echoes_newline
    assert edited.sane().maps_newlines
    assert edited.sane().codes == edited.codes


def test_modes_survive_both_ways():
    attributes = [COOKED.iflag, COOKED.oflag, 99, COOKED.lflag, 15, 15, [b"\0"] * 32]
    assert Modes.of(attributes) == COOKED
    assert COOKED.put_into(attributes) == attributes
    iflag, oflag, lflag, codes = COOKED.to_json()
    assert Modes(iflag, oflag, lflag, tuple(codes)) == COOKED


def test_a_window_loses_the_tag_but_never_all_columns():
    assert window((24, 80), 14) == [24, 66]
    assert window((24, 80), 0) == [24, 80]
    assert window((24, 25), 14) == [24, 20]
    assert window((0, 0), 14) == [0, 0]


def test_debuggers_take_turns():
    turns = DebugTurns()
    assert turns.current is None
    assert turns.enter(2, 1)
    assert not turns.enter(0, 1)
    assert turns.current == 2
    assert turns.leave(1) is None
    assert turns.leave(2) == 1
    assert turns.current == 0
    assert turns.leave(0) == 1
    assert turns.current is None


def test_the_launcher_stops_last():
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


def test_a_host_that_does_not_answer_is_not_waited_for():
    stops = []
    suspension = Suspension(lambda: stops.append(1))
    suspension.begin([0], 10.0)
    assert suspension.next_deadline() == 11.0
    suspension.on_time(11.0)
    assert stops == [1]


class Wire:
    """What is sent to instances, and shown of them."""

    def __init__(self):
        self.sent = []

    def send_bytes_to(self, instance, kind, payload):
        self.sent.append((instance, kind, payload))

    def give_keyboard(self, instance, *, shows_hidden):
        pass

    def map_newlines(self, mapped):
        pass


def test_the_rest_of_a_file_is_left_where_the_program_on_another_host_stopped_reading(tmp_path):
    (tmp_path / "lines").write_text("one\ntwo\n")
    keyboard = KeyboardInput(1, wire := Wire(), wire, print, terminal=None, is_passed_on=True)
    before = os.dup(0)
    try:
        with selectors.DefaultSelector() as selector, (tmp_path / "lines").open() as file:
            os.dup2(file.fileno(), 0)
            keyboard.begin(selector)
            assert wire.sent == [(1, control_protocol.KEYS, b"one\ntwo\n")]
            keyboard.received(1, control_protocol.UNREAD, 4)
            assert os.read(0, 100) == b"two\n"
    finally:
        os.dup2(before, 0)
        os.close(before)
