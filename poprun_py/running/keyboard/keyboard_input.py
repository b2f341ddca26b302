"""Standard input of the launcher, which is sent to one instance at a time, and Ctrl-Z.

The owner of the keyboard is the instance that reads standard input, or an instance in a debugger.
The user's terminal is set to the modes that the program of the keyboard's owner asks for. If
standard input is not a terminal, its file descriptor is sent to an instance on the launcher's host,
but its bytes are sent in messages to an instance on another host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.instance import control_protocol

if TYPE_CHECKING:
    from poprun_py.running.keyboard.user_terminal import UserTerminal

_CHUNK = 4096
# The seconds between two checks of a launcher in the background whether it has come to the
# foreground.
_CHECK_SECONDS = 0.2
# If a host does not answer after Ctrl-Z, the launcher suspends itself after this many seconds, so
# that the user gets the shell prompt.
_ANSWER_SECONDS = 1.0


# The next two classes are interfaces of objects in the package running.supervise. That package
# cannot be imported here, because running.supervise imports keyboard_input.


class _Connections(Protocol):
    """The launcher's connections to the wrappers of the instances."""

    def send_to(self, instance: int, kind: bytes, value: Any) -> None: ...
    def send_bytes_to(self, instance: int, kind: bytes, payload: bytes) -> None: ...
    def broadcast(self, kind: bytes, value: Any) -> None: ...


class _Output(Protocol):
    """The output of all instances on the user's terminal."""

    def give_keyboard(self, instance: int | None, *, shows_hidden: bool) -> None: ...
    def map_newlines(self, mapped: bool) -> None: ...
    def enter_typed(self) -> None: ...


def open_terminal() -> UserTerminal | None:
    """Return the user's terminal; None if standard input is not the controlling terminal."""
    if not os.isatty(0):
        return None
    # Import the module user_terminal only for jobs that have a terminal.
    from poprun_py.running.keyboard.user_terminal import UserTerminal

    try:
        return UserTerminal()
    except OSError:
        return None


class KeyboardInput:
    """Reads standard input and sends it to the owner of the keyboard.

    Args:
        instance: The instance that reads standard input.
        on_debugger: A function that is called with the instance whose debugger gets the keyboard,
            or with None after the last debugger has ended.
        terminal: The user's terminal; None if standard input is not the controlling terminal.
        is_passed_on: Whether standard input is not a terminal and its bytes are sent to an instance
            on another host.
        is_shown: Whether the launcher's stdout and its stderr are terminals. The program's
            stdout and stderr are terminals in the same cases.
        tag_width: A function that returns the width of the tag before each output line of an
            instance.
    """

    def __init__(
        self,
        instance: int,
        connections: _Connections,
        output: _Output,
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
        self._unconfirmed: set[int] = set()  # Instances whose programs have unread input.
        self._modes: dict[int, list[Any]] = {}  # The terminal modes of programs.
        self._ended: set[int] = set()
        # The instances in a debugger, in the order in which they entered it, each with the number
        # of its last breakpoint() call. The first instance in a debugger has the keyboard.
        self._debuggers: dict[int, int] = {}
        # The keys are instances in a debugger that other instances wait for. The values are the
        # numbers of the breakpoint() calls in which the other instances wait.
        self._awaited_calls: dict[int, int] = {}
        self._is_watched = False  # Whether the selector watches standard input.
        self._is_always_ready = False  # Whether standard input is a regular file.

    @property
    def is_debugging(self) -> bool:
        """Whether an instance is in a debugger."""
        return bool(self._debuggers)

    # --- start and end of the input -------------------------------------------------------

    def start_of(self, instance: int) -> dict[str, Any]:
        """Return the keyboard settings to send to a wrapper before its program starts."""
        if not self.is_there:
            return {}
        setup: dict[str, Any] = {}
        if self._terminal is not None:
            setup = {"debugger": True, "term": os.environ.get("TERM", "")}
        if instance == self._reader:
            setup["input"] = self._terminal_setup(instance) if self._terminal is not None else {}
        return {"keyboard": setup}

    def begin(self, selector: selectors.BaseSelector) -> None:
        """Start to send input to the instance that reads it, when all programs start."""
        self._selector = selector
        if self.is_there:
            self._give_to(self._reader)

    def close(self) -> None:
        """Stop reading standard input, and restore the modes of the user's terminal."""
        self._watch(False)
        if self._terminal is not None:
            self._terminal.close()
        self.is_there, self._terminal = False, None

    def let_go(self) -> None:
        """Restore the modes of the user's terminal before the launcher is suspended or ends."""
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
            # The program has not read the last ``value`` bytes of standard input. If standard
            # input is a file, move back by these bytes for the next reader. Unread bytes of a pipe
            # are lost.
            with contextlib.suppress(OSError):
                os.lseek(0, -value, os.SEEK_CUR)
        elif kind == control_protocol.TERMINAL_MODES:
            *modes, is_flushed = value
            self._modes[instance] = modes
            if instance == self._owner:
                self._set_modes(drop_input=is_flushed)
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
        """Send the size of the user's terminal to the owner of the keyboard."""
        if self._terminal is not None and self._owner is not None:
            window = self._terminal.window(self._tag_width(self._owner))
            self._connections.send_to(self._owner, control_protocol.WINDOW_SIZE, window)

    def on_time(self, _now: float) -> None:
        """Read standard input (the terminal, a file or a pipe) if the launcher may do so now."""
        terminal = self._terminal
        if terminal and self._selector is not None and terminal.has_come_to_foreground():
            self.resized()
            self._set_modes()
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
        if event == "leave":
            self._leave_debugger(instance)
        elif event == "wait":
            self._awaited_calls[awaited] = call
            if awaited in self._ended:
                self._connections.broadcast(control_protocol.DEBUGGER_LEFT, call)
        else:
            is_first = not self._debuggers
            self._debuggers[instance] = call
            if is_first:
                self._enter_debugger(instance)

    def _enter_debugger(self, instance: int) -> None:
        self._on_debugger(instance)
        self._give_to(instance)
        setup = self._terminal_setup(instance)
        self._connections.send_to(instance, control_protocol.NEW_TERMINAL, setup)

    def _leave_debugger(self, instance: int) -> None:
        was_current = instance == next(iter(self._debuggers), None)
        call = self._debuggers.pop(instance, None)
        if call is not None:
            self._connections.broadcast(control_protocol.DEBUGGER_LEFT, call)
        if not was_current:
            return
        if self._debuggers:
            self._enter_debugger(next(iter(self._debuggers)))
        else:
            self._on_debugger(None)
            self._give_to(self._reader)

    # --- the user's terminal --------------------------------------------------------------

    def _terminal_setup(self, instance: int) -> dict[str, Any]:
        assert self._terminal is not None
        is_stdout, is_stderr = self._is_shown
        stream = control_protocol.STDOUT if is_stdout else control_protocol.STDERR
        return {
            "modes": astuple(self._terminal.first_modes),
            "size": self._terminal.window(self._tag_width(instance)),
            "is_stdout": is_stdout,
            "is_stderr": is_stderr,
            "stream": stream.decode(),
        }

    def _set_modes(self, *, drop_input: bool = False) -> None:
        if self._terminal is not None:
            modes = self._modes.get(self._owner) if self._owner is not None else None
            self._terminal.follow(modes, drop_input=drop_input)
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
                keys = b""  # if standard input cannot be read, treat it as ended
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


# --- standard input that is not a terminal --------------------------------------------------------


def pass_on_stdin(channel: socket.socket) -> None:
    """Send the file descriptor of standard input over a Unix socket to an instance.

    The program then reads the file, pipe or socket itself, even a pipe or socket of another user. A
    later reader finds all bytes that the program has not read. If standard input cannot be read, as
    under ``nohup``, a descriptor of /dev/null is sent instead.
    """
    try:
        is_readable = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        is_readable = False
    descriptor = 0 if is_readable else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # If the instance has ended, sending the descriptor fails.
        with contextlib.suppress(OSError):
            socket.send_fds(channel, [b"\0"], [descriptor])
    finally:
        if not is_readable:
            os.close(descriptor)


def stdin_position() -> int | None:
    """Return the position in standard input; None if standard input is not a regular file."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else None
    except OSError:
        return None


def rewind_stdin(position: int | None) -> None:
    """Move standard input back to ``position``, so that a restarted job reads the input again."""
    if position is not None:
        with contextlib.suppress(OSError):
            os.lseek(0, position, os.SEEK_SET)


# --- Ctrl-Z ---------------------------------------------------------------------------------------


class Suspension:
    """Waits until the programs of a job are suspended, and then suspends the launcher.

    The function ``stop`` suspends the launcher, and returns when the user continues it.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._awaited: set[int] = set()
        self._stop_at = float("inf")

    @property
    def is_asked(self) -> bool:
        """Whether the launcher is waiting until the programs of the job are suspended."""
        return self._stop_at != float("inf")

    def begin(self, instances: Iterable[int], now: float) -> None:
        """Start to wait until the wrappers of ``instances`` have suspended the programs."""
        self._awaited = set(instances)
        self._stop_at = now + _ANSWER_SECONDS

    def stopped(self, instance: int) -> None:
        """Handle a message that the program of an instance is suspended or has ended."""
        self._awaited.discard(instance)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; inf if no call is needed."""
        if self._awaited:
            return self._stop_at
        return 0.0 if self.is_asked else float("inf")

    def on_time(self, now: float) -> None:
        """Suspend the launcher if all wrappers have answered or the time-out has passed."""
        if self.is_asked and (not self._awaited or now >= self._stop_at):
            self._stop_at = float("inf")
            self._stop()


def take_signal(number: int) -> None:
    """Send a signal to this process with its default effect, such as suspending or ending it."""
    caught = signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.signal(number, caught)
