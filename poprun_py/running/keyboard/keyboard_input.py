"""Input from the keyboard, which is passed on to one instance at a time.

The owner of the keyboard is the instance that reads standard input, or an instance in a debugger.
The user's terminal is set to the modes that the owner's program asks for. Standard input that is
not a terminal is passed on only to an instance on another host.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.instance import control_protocol

if TYPE_CHECKING:
    from poprun_py.running.keyboard.user_terminal import Modes, UserTerminal

_CHUNK = 4096
# While the launcher is in the background, it checks each time after this many seconds whether it
# has come to the foreground.
_CHECK_SECONDS = 0.2


# The next two classes are interfaces of objects in running.supervise. The package running.supervise
# cannot be imported here, because running.supervise imports this module.


class Connections(Protocol):
    """The launcher's connections to the wrappers of the instances."""

    def send_to(self, instance: int, kind: bytes, value: Any) -> None:
        """Send a message with a value to an instance's wrapper."""

    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None:
        """Send a message with raw bytes to an instance's wrapper."""

    def broadcast(self, kind: bytes, value: Any) -> None:
        """Send a message with a value to the wrappers of all instances."""


class Output(Protocol):
    """The output of all instances on the user's terminal."""

    def give_keyboard(self, instance: int | None, *, shows_hidden: bool) -> None:
        """Set the instance that owns the keyboard.

        ``shows_hidden`` tells whether the owner's output is shown even if the user has hidden it.
        """

    def map_newlines(self, mapped: bool) -> None:
        """Set whether the terminal returns to the first column after a newline."""

    def enter_typed(self) -> None:
        """Handle the Enter key, which has moved the terminal's cursor to the next line."""


def open_terminal() -> UserTerminal | None:
    """Return standard input as a terminal; None if it does not control the launcher."""
    if not os.isatty(0):
        return None
    # The module is imported here, so that jobs without a terminal start without importing it.
    from poprun_py.running.keyboard.user_terminal import UserTerminal

    try:
        return UserTerminal()
    except OSError:
        return None


class DebuggerQueue:
    """The instances in a debugger, in the order in which they called their debuggers.

    The first instance in the queue has the keyboard.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, int]] = deque()  # pairs of an instance and its debugger call

    @property
    def current(self) -> int | None:
        """The instance whose debugger has the keyboard."""
        return self._queue[0][0] if self._queue else None

    def enter(self, instance: int, call: int) -> bool:
        """Add an instance that has called its debugger; return whether it gets the keyboard now."""
        self._queue.append((instance, call))
        return len(self._queue) == 1

    def leave(self, instance: int) -> int | None:
        """Remove an instance; return the number of its last debugger call, None if not queued."""
        calls = [call for each, call in self._queue if each == instance]
        self._queue = deque(entry for entry in self._queue if entry[0] != instance)
        return max(calls) if calls else None


class KeyboardInput:
    """Reads standard input and sends it to the owner of the keyboard.

    Args:
        instance: The instance that reads standard input.
        on_debugger: A function that is called with the instance whose debugger gets the keyboard,
            or with None if the last debugger has ended.
        terminal: The user's terminal, if standard input is the terminal that controls the launcher.
        is_passed_on: Whether a standard input that is not a terminal is passed on to an instance on
            another host.
        is_shown: A pair of flags: whether the launcher's stdout is a terminal, and whether its
            stderr is a terminal. The same streams of the program are then terminals as well.
        tag_width: A function that returns the columns of the tag before each line of an instance.
    """

    def __init__(
        self,
        instance: int,
        connections: Connections,
        output: Output,
        on_debugger: Callable[[int | None], None],
        *,
        terminal: UserTerminal | None,
        is_passed_on: bool,
        is_shown: tuple[bool, bool] = (True, True),
        tag_width: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.is_there = terminal is not None or is_passed_on
        self._reader = instance
        self._connections = connections
        self._output = output
        self._on_debugger = on_debugger
        self._terminal = terminal
        self._is_shown = is_shown
        self._tag_width = tag_width
        self._selector: selectors.BaseSelector | None = None
        self._owner: int | None = None
        self._unconfirmed: set[int] = set()  # Instances that have not read all their input.
        self._modes: dict[int, Modes] = {}  # The terminal modes that programs have set.
        self._first_modes = terminal.own_modes if terminal is not None else None
        self._ended: set[int] = set()
        self._debuggers = DebuggerQueue()
        # The keys are instances whose debugger other instances wait for. The values are the numbers
        # of the breakpoint() calls in which the other instances wait.
        self._awaited_calls: dict[int, int] = {}
        self._is_watched = False  # Whether the selector watches standard input.
        self._is_always_ready = False  # Whether standard input is a file.

    @property
    def is_debugging(self) -> bool:
        """Whether an instance is in the debugger."""
        return self._debuggers.current is not None

    # --- start and end of the input -------------------------------------------------------

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return the keyboard settings that a wrapper receives before its program starts."""
        if not self.is_there:
            return {}
        setup: dict[str, Any] = {}
        if self._terminal is not None:
            setup = {"debugger": True, "term": os.environ.get("TERM", "")}
        if instance == self._reader:
            setup["input"] = self._terminal_setup(instance) if self._terminal is not None else {}
        return {"keyboard": setup}

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Start to pass on input, when all programs start."""
        self._selector = selector
        if self.is_there:
            self._give_to(self._reader)

    def close(self) -> None:
        """Stop reading standard input, and restore the terminal's modes."""
        self._watch(False)
        if self._terminal is not None:
            self._terminal.close()
        self.is_there, self._terminal = False, None

    def let_go(self) -> None:
        """Restore the terminal's modes, because the launcher is suspended or ends."""
        if self._terminal is not None:
            self._watch(False)
            self._terminal.restore()

    # --- messages of wrappers and other events --------------------------------------------

    def received(self, instance: int, kind: bytes, value: Any) -> None:
        """Handle a message from an instance's wrapper."""
        if kind == control_protocol.KEYS_READ:
            self._unconfirmed.discard(instance)
            self._read_or_wait()
        elif kind == control_protocol.UNREAD:
            self._seek_back(value)
        elif kind == control_protocol.TERMINAL_MODES:
            self._take_modes(instance, value)
        elif kind == control_protocol.DEBUGGER:
            self._on_debug(instance, *value)

    def ended(self, instance: int) -> None:
        """Handle the end of an instance's program."""
        self._ended.add(instance)
        if instance in self._awaited_calls:
            self._connections.broadcast(
                control_protocol.DEBUGGER_LEFT, self._awaited_calls[instance]
            )
        self._leave_debugger(instance)
        if instance == self._owner:
            self._give_to(None)

    def resized(self) -> None:
        """Send the size of the terminal to the owner of the keyboard."""
        if self._terminal is not None and self._owner is not None:
            window = self._window(self._owner)
            self._connections.send_to(self._owner, control_protocol.WINDOW_SIZE, window)

    def on_time(self, now: float) -> None:
        """Check whether the launcher may use its terminal now, and if so, read from it."""
        del now
        if self._terminal is not None and self._selector is not None and self.is_there:
            if self._terminal.has_come_to_foreground():
                self.resized()
                self._set_modes()
            self._read_or_wait()
        elif self._is_always_ready:
            self._read_or_wait()

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        if self._owner is None or not self.is_there or self._owner in self._unconfirmed:
            return float("inf")
        if self._is_always_ready:
            return 0.0
        if self._terminal is None or self._is_watched:
            return float("inf")
        return time.monotonic() + _CHECK_SECONDS

    # --- the owner of the keyboard --------------------------------------------------------

    def _give_to(self, instance: int | None) -> None:
        self._owner = instance if instance not in self._ended else None
        self._output.give_keyboard(self._owner, shows_hidden=self.is_debugging)
        self.resized()
        self._set_modes()
        self._read_or_wait()

    def _on_debug(self, instance: int, event: str, call: int, awaited: int = -1) -> None:
        """Handle a program that enters its debugger, leaves it, or waits for another debugger."""
        if event == "leave":
            self._leave_debugger(instance)
        elif event == "wait":
            self._awaited_calls[awaited] = call
            if awaited in self._ended:
                self._connections.broadcast(control_protocol.DEBUGGER_LEFT, call)
        elif self._debuggers.enter(instance, call):
            self._enter_debugger(instance)

    def _enter_debugger(self, instance: int) -> None:
        self._on_debugger(instance)
        self._give_to(instance)
        setup = self._terminal_setup(instance)
        self._connections.send_to(instance, control_protocol.NEW_TERMINAL, setup)

    def _leave_debugger(self, instance: int) -> None:
        was_current = self._debuggers.current == instance
        call = self._debuggers.leave(instance)
        if call is not None:
            self._connections.broadcast(control_protocol.DEBUGGER_LEFT, call)
        if not was_current:
            return
        if (following := self._debuggers.current) is not None:
            self._enter_debugger(following)
        else:
            self._on_debugger(None)
            self._give_to(self._reader)

    # --- the user's terminal --------------------------------------------------------------

    def _terminal_setup(self, instance: int) -> dict[str, Any]:
        """Return the settings of a program's terminal, such as modes, size and output streams."""
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
        from poprun_py.running.keyboard.user_terminal import window

        assert self._terminal is not None
        return window(self._terminal.size(), self._tag_width(instance))

    def _take_modes(self, instance: int, value: list[Any]) -> None:
        from poprun_py.running.keyboard.user_terminal import Modes

        iflag, oflag, lflag, codes, is_flushed = value
        self._modes[instance] = Modes(iflag, oflag, lflag, tuple(codes))
        if instance == self._owner:
            self._set_modes(drop_input=is_flushed)

    def _set_modes(self, *, drop_input: bool = False) -> None:
        """Set the user's terminal to the modes that the owner's program asks for."""
        if self._terminal is None:
            return
        wanted = self._terminal.own_modes
        if self._owner in self._modes and self._first_modes is not None:
            wanted = wanted.with_changes(self._first_modes, self._modes[self._owner])
        self._terminal.set(wanted, drop_input=drop_input)
        self._output.map_newlines(self._terminal.modes.maps_newlines)

    # --- reading standard input -----------------------------------------------------------

    def _read_or_wait(self) -> None:
        """If input may be read now, read a file, or let the selector watch a terminal or pipe."""
        may_read = self.is_there and self._owner is not None
        may_read = may_read and self._owner not in self._unconfirmed
        if self._terminal is not None:
            may_read = may_read and self._terminal.may_use()
        self._watch(may_read)
        if may_read and self._is_always_ready:
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

    def _seek_back(self, count: int) -> None:
        """Move the position in a file back by the ``count`` bytes that the program has not read.

        The next reader of the file then finds these bytes. Unread bytes of a pipe are lost.
        """
        with contextlib.suppress(OSError):
            os.lseek(0, -count, os.SEEK_CUR)

    def _read(self, _: Any, __: int) -> None:
        owner = self._owner
        if owner is None:
            return
        if self._terminal is not None:
            keys = self._terminal.read()
        else:
            try:
                keys = os.read(0, _CHUNK)
            except BlockingIOError:
                keys = None
            except OSError:
                keys = b""  # treat an input that cannot be read as ended
        if keys is None:
            self._read_or_wait()
            return
        self._unconfirmed.add(owner)
        self._connections.send_bytes_to(owner, control_protocol.KEYS, keys)
        if self._terminal is None:
            self.is_there = bool(keys)
        elif self._terminal.modes.echoes_newline and keys.endswith(b"\n"):
            self._output.enter_typed()
        self._read_or_wait()
