"""The keyboard of a job: passes on what is typed to the instance that has it.

It sets the user's terminal as that program wants its own. Where standard input is no
terminal, it passes on what cannot reach its instance in any other way.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.instance import control_protocol
from poprun_py.running.keyboard.debug_turns import DebugTurns

if TYPE_CHECKING:
    from poprun_py.running.keyboard.terminal_modes import Modes
    from poprun_py.running.keyboard.user_terminal import UserTerminal

_CHUNK = 4096
# How often a job in the background looks whether it has come to the foreground.
_LOOK_SECONDS = 0.2


class Wire(Protocol):
    """The connections to the instances."""

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send a frame with a value to an instance."""

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send a frame to an instance."""

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send a frame with a value to all instances."""


class Shown(Protocol):
    """What is shown of the instances, on the same terminal."""

    def give_keyboard(self, instance: int | None, *, shows_hidden: bool) -> None:
        """This instance has the keyboard now, it alone; perhaps it is shown if it is hidden."""

    def map_newlines(self, mapped: bool) -> None:
        """The terminal returns to the first column after a newline, or does not."""

    def enter_typed(self) -> None:
        """The terminal itself has moved the cursor to the next line."""


def open_terminal() -> UserTerminal | None:
    """Return the terminal that is standard input, if it controls this process."""
    if not os.isatty(0):
        return None
    from poprun_py.running.keyboard.user_terminal import (
        UserTerminal,
    )  # other jobs do not pay for it

    try:
        return UserTerminal()
    except OSError:
        return None


class KeyboardInput:
    """What comes from standard input, and whose it is.

    Args:
        instance: the instance that reads standard input.
        wire: the connections to the instances.
        shown: what is shown of them.
        on_debugger: told which instance is in the debugger now, None for none.
        terminal: the user's terminal, if standard input is one that controls the launcher.
        is_passed_on: whether standard input that is not a terminal is read here and passed on.
            This is the case if the instance is on another host.
        is_shown: whether the launcher's stdout and stderr are terminals: so are the program's.
        tag_width: columns in front of each line of an instance.
    """

    def __init__(
        self,
        instance: int,
        wire: Wire,
        shown: Shown,
        on_debugger: Callable[[int | None], None],
        *,
        terminal: UserTerminal | None,
        is_passed_on: bool,
        is_shown: tuple[bool, bool] = (True, True),
        tag_width: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.is_there = terminal is not None or is_passed_on
        self._reader = instance
        self._wire = wire
        self._shown = shown
        self._on_debugger = on_debugger
        self._terminal = terminal
        self._is_shown = is_shown
        self._tag_width = tag_width
        self._selector: selectors.BaseSelector | None = None
        self._holder: int | None = None
        self._owing: set[int] = set()  # instances that have not read what they were sent
        self._modes: dict[int, Modes] = {}  # what programs have set
        self._first_modes = terminal.own_modes if terminal is not None else None
        self._ended: set[int] = set()
        self._turns = DebugTurns()
        # The last call of breakpoint() that others wait in, by the instance that they wait for.
        self._awaited_calls: dict[int, int] = {}
        self._is_watched = False
        self._is_always_ready = False  # a file, which no selector takes

    @property
    def is_debugging(self) -> bool:
        """Whether an instance is in the debugger."""
        return self._turns.current is not None

    # --- start and end --------------------------------------------------------------------

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return what the wrapper of an instance is told as its program starts."""
        if not self.is_there:
            return {}
        setup: dict[str, Any] = {}
        if self._terminal is not None:
            setup = {"debugger": True, "term": os.environ.get("TERM", "")}
        if instance == self._reader:
            setup["input"] = self._terminal_setup(instance) if self._terminal is not None else {}
        return {"keyboard": setup}

    def begin(self, selector: selectors.BaseSelector) -> None:
        """All programs start: pass on what is typed from now on."""
        self._selector = selector
        if self.is_there:
            self._give(self._reader)

    def close(self) -> None:
        """Read no more, and leave the terminal as it was."""
        self._watch(False)
        if self._terminal is not None:
            self._terminal.close()
        self.is_there, self._terminal = False, None

    def let_go(self) -> None:
        """Leave the terminal as it was: the launcher stops or ends."""
        if self._terminal is not None:
            self._watch(False)
            self._terminal.restore()

    # --- what comes -----------------------------------------------------------------------

    def received(self, instance: int, kind: bytes, value: Any) -> None:
        """Do what a frame of an instance says."""
        if kind == control_protocol.KEYS_READ:
            self._owing.discard(instance)
            self._look()
        elif kind == control_protocol.UNREAD:
            self._give_back(value)
        elif kind == control_protocol.TERMINAL_MODES:
            self._take_modes(instance, value)
        elif kind == control_protocol.DEBUGGER:
            self._on_debug(instance, *value)

    def ended(self, instance: int) -> None:
        """A program has ended: it reads no more, and is in no debugger."""
        self._ended.add(instance)
        if instance in self._awaited_calls:
            self._wire.broadcast(control_protocol.DEBUGGER_LEFT, self._awaited_calls[instance])
        self._leave_debugger(instance)
        if instance == self._holder:
            self._give(None)

    def resized(self) -> None:
        """Tell the size of the terminal to whoever has it."""
        if self._terminal is not None and self._holder is not None:
            self._wire.send_to(
                self._holder, control_protocol.WINDOW_SIZE, self._window(self._holder)
            )

    def on_time(self, now: float) -> None:
        """Look whether the terminal is ours; ``now`` is the time."""
        del now
        if self._terminal is not None and self._selector is not None and self.is_there:
            if self._terminal.has_come():
                self.resized()
                self._set_modes()
            self._look()
        elif self._is_always_ready:
            self._look()

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        if self._holder is None or not self.is_there:
            return float("inf")
        if self._is_always_ready:
            return float("inf") if self._holder in self._owing else 0.0
        is_away = self._terminal is not None and not self._is_watched
        if not is_away or self._holder in self._owing:
            return float("inf")
        return time.monotonic() + _LOOK_SECONDS

    # --- whose it is ----------------------------------------------------------------------

    def _give(self, instance: int | None) -> None:
        """Give the keyboard to an instance, or to none."""
        self._holder = instance if instance not in self._ended else None
        self._shown.give_keyboard(self._holder, shows_hidden=self.is_debugging)
        if self._holder is not None and self._terminal is not None:
            self.resized()
        self._set_modes()
        self._look()

    def _on_debug(self, instance: int, what: str, call: int, awaited: int = -1) -> None:
        """A program wants the terminal for its debugger, has left it, or waits for another's."""
        if what == "leave":
            self._leave_debugger(instance)
        elif what == "wait":
            self._awaited_calls[awaited] = call
            if awaited in self._ended:
                self._wire.broadcast(control_protocol.DEBUGGER_LEFT, call)
        elif self._turns.enter(instance, call):
            self._enter_debugger(instance)

    def _enter_debugger(self, instance: int) -> None:
        self._on_debugger(instance)
        self._give(instance)
        self._wire.send_to(instance, control_protocol.NEW_TERMINAL, self._terminal_setup(instance))

    def _leave_debugger(self, instance: int) -> None:
        was_current = self._turns.current == instance
        call = self._turns.leave(instance)
        if call is not None:
            self._wire.broadcast(control_protocol.DEBUGGER_LEFT, call)
        if not was_current:
            return
        if (following := self._turns.current) is not None:
            self._enter_debugger(following)
        else:
            self._on_debugger(None)
            self._give(self._reader)

    # --- the terminal ---------------------------------------------------------------------

    def _terminal_setup(self, instance: int) -> dict[str, Any]:
        """Return what the terminal of a program is to be like."""
        assert self._first_modes is not None
        is_stdout, is_stderr = self._is_shown
        stream = control_protocol.STDOUT if is_stdout else control_protocol.STDERR
        return {
            "modes": self._first_modes.to_json(),
            "size": self._window(instance),
            "is_stdout": is_stdout,
            "is_stderr": is_stderr,
            "stream": stream.decode(),
        }

    def _window(self, instance: int) -> list[int]:
        from poprun_py.running.keyboard.terminal_modes import window

        assert self._terminal is not None
        return window(self._terminal.size(), self._tag_width(instance))

    def _take_modes(self, instance: int, value: list[Any]) -> None:
        from poprun_py.running.keyboard.terminal_modes import Modes

        iflag, oflag, lflag, codes, is_flushed = value
        self._modes[instance] = Modes(iflag, oflag, lflag, tuple(codes))
        if instance == self._holder:
            self._set_modes(drop_input=is_flushed)

    def _set_modes(self, *, drop_input: bool = False) -> None:
        """Set the user's terminal as the program that has it wants its own."""
        if self._terminal is None:
            return
        wanted = self._terminal.own_modes
        if self._holder in self._modes and self._first_modes is not None:
            wanted = wanted.changed_as(self._first_modes, self._modes[self._holder])
        self._terminal.set(wanted, drop_input=drop_input)
        self._shown.map_newlines(self._terminal.modes.maps_newlines)

    # --- reading --------------------------------------------------------------------------

    def _look(self) -> None:
        """Read as long as somebody takes it and it is ours to read."""
        wanted = self.is_there and self._holder is not None and self._holder not in self._owing
        if self._terminal is not None:
            wanted = wanted and self._terminal.is_ours
        self._watch(wanted)
        if wanted and self._is_always_ready:
            self._read(None, 0)

    def _watch(self, wanted: bool) -> None:
        if self._selector is None or wanted == self._is_watched or self._is_always_ready:
            return
        source = self._terminal if self._terminal is not None else 0
        if not wanted:
            self._selector.unregister(source)
        else:
            try:
                self._selector.register(source, selectors.EVENT_READ, self._read)
            except PermissionError:
                self._is_always_ready = True
                return
        self._is_watched = wanted

    def _give_back(self, count: int) -> None:
        """Move back in a file by the ``count`` bytes that the program has not read.

        The next reader of the file then finds them. Bytes that were read from a pipe are lost.
        """
        with contextlib.suppress(OSError):
            os.lseek(0, -count, os.SEEK_CUR)

    def _read(self, _: Any, __: int) -> None:
        """Pass on what there is."""
        holder = self._holder
        if holder is None:
            return
        if self._terminal is not None:
            keys = self._terminal.read()
        else:
            try:
                keys = os.read(0, _CHUNK)
            except BlockingIOError:
                keys = None
            except OSError:
                keys = b""  # what cannot be read has ended
        if keys is None:
            self._look()
            return
        self._owing.add(holder)
        self._wire.send_bytes_to(holder, control_protocol.KEYS, keys)
        if self._terminal is None:
            self.is_there = bool(keys)
        elif self._terminal.modes.echoes_newline and keys.endswith(b"\n"):
            self._shown.enter_typed()
        self._look()
