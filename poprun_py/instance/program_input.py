"""Keyboard input of a program, through a terminal or a pipe, and requests of its debugger.

The launcher decides which instance has the keyboard. The program's terminal neither echoes nor
edits lines (EXTPROC), because the user's own terminal does both. When the program changes the modes
of its terminal, the kernel notifies the wrapper (packet mode), and the wrapper tells the launcher,
as in Telnet's LINEMODE.
"""

import errno
import fcntl
import os
import select
import sys
import termios
import time

from poprun_py.instance import control_protocol
from poprun_py.instance.quick_imports import loads

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from poprun_py.instance.progress_memory import ProgressMemory

    Send = Callable[[bytes, Any], None]
    AddOutput = Callable[["Pty", bytes], None]

# Constants from linux/termbits.h and linux/tty.h that Python's module termios lacks.
_EXTPROC = 0o200000
_PKT_FLUSHREAD, _PKT_IOCTL = 0x01, 0x40
_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
_CTRL_D = b"\x04"
# The first and the longest pause between two checks whether the program has read its input.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25
# The requests that a program's debugger may make, each with the number of its arguments.
_REQUESTS = {"enter": 1, "leave": 1, "wait": 2}


class ProgramInput:
    """The keyboard input of one program, and the requests of its debugger.

    Args:
        setup: The launcher's settings for the keyboard. ``input`` (see ``_make_typed_input``) is
            present if the program has the keyboard from its start. ``debugger`` tells whether
            breakpoint() may ask for the keyboard. ``term`` is the program's value of TERM.
        memory: The memory that is shared with the program.
        send: The function that queues a message to the launcher.
        add_output: The function that is called with each terminal of the program, the controlling
            terminal first, and with the kind of message for the terminal's output.
    """

    def __init__(
        self,
        setup: "dict[str, Any]",
        memory: "ProgressMemory",
        send: "Send",
        add_output: "AddOutput",
    ) -> None:
        self._memory = memory
        self._send = send
        self._add_output = add_output
        self._term = setup.get("term", "")
        self._errno = 0  # the errno if a terminal could not be made, else 0
        self._has_ended = False
        self.typed = TypedInput(send)
        if "input" in setup:
            self._make_typed_input(setup["input"])
        # The pipe to which the program's debugger writes its requests; -1 without a debugger.
        self.requests = self._write_requests = -1
        self._incomplete_request = b""
        if setup.get("debugger"):
            self.requests, self._write_requests = os.pipe()
            os.set_blocking(self.requests, False)

    def _make_typed_input(self, setup: "dict[str, Any]") -> None:
        """Create the terminal or the pipe from which the program reads its keyboard input.

        Args:
            setup: The settings of the terminal: its ``modes`` (iflag, oflag, lflag, cc), its
                ``size`` (rows, columns), whether the program's stdout and stderr are terminals too
                (``is_stdout``, ``is_stderr``), and the kind of message for the terminal's output
                (``stream``). Empty for a pipe.
        """
        try:
            if setup:
                self.typed = ProgramTerminal(setup, self._send, self._add_output)
            else:
                self.typed = ProgramPipe(self._send)
        except OSError as error:
            self._errno = error.errno or errno.ENXIO
            # If no terminal can be made, the program runs with an empty standard input.
            os.write(
                2,
                f"poprun-py: warning: cannot make a terminal for the keyboard: {error}\n".encode(),
            )

    @property
    def terminal(self) -> "ProgramTerminal | None":
        """The program's terminal; None if the program reads a pipe or has no keyboard input."""
        return self.typed if isinstance(self.typed, ProgramTerminal) else None

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the program's terminal and its debugger."""
        variables = {}
        if self._term and "TERM" not in os.environ:
            variables["TERM"] = self._term
        if self._write_requests >= 0:
            variables["POPDIST_DEBUGGER"] = f"/proc/{os.getpid()}/fd/{self._write_requests}"
        return variables

    def ended(self) -> None:
        """After the program's end, tell the launcher how much input the program has not read."""
        self._has_ended = True
        self.typed.ended()

    def close(self) -> None:
        """Close the pipe of the debugger's requests, after the program's end."""
        for descriptor in (self.requests, self._write_requests):
            if descriptor >= 0:
                os.close(descriptor)
        self.requests = self._write_requests = -1

    def read_requests(self) -> None:
        """Pass the requests of the program's debugger on to the launcher."""
        data = self._incomplete_request + os.read(self.requests, 4096)
        *lines, self._incomplete_request = data.split(b"\n")
        for line in lines:
            what, *words = line.decode(errors="replace").split() or [""]
            try:
                numbers = [int(word) for word in words]
            except ValueError:
                continue  # a process other than the program's debugger wrote this line
            if len(numbers) != _REQUESTS.get(what):
                continue
            if what == "leave":
                self._memory.lend_terminal(0)
            self._send(control_protocol.DEBUGGER, [what, *numbers])

    def handle(self, kind: bytes, payload: bytes) -> None:
        """Handle a message of the launcher about the keyboard."""
        if kind == control_protocol.KEYS:
            self.typed.type(payload)
        elif kind == control_protocol.WINDOW_SIZE and self.terminal is not None:
            self.terminal.resize(loads(payload))
        elif kind == control_protocol.NEW_TERMINAL:
            self._memory.lend_terminal(self._lent_terminal(loads(payload)))
        elif kind == control_protocol.DEBUGGER_LEFT:
            self._memory.leave_debugger(loads(payload))

    def _lent_terminal(self, setup: "dict[str, Any]") -> int:
        """Return the argument for ``ProgressMemory.lend_terminal``; make a terminal if needed."""
        if self._has_ended:
            # The program ended while the launcher answered the program's debugger. If the wrapper
            # made a terminal now, it would wait for the end of the terminal's output.
            return -errno.ENXIO
        if self.terminal is None:
            self._make_typed_input(setup)
        return -self._errno if self.terminal is None else self.terminal.number + 1


class TypedInput:
    """Passes typed bytes to the program; asks the launcher for more when all bytes are read.

    Typed bytes are written to ``descriptor``. If ``descriptor`` is -1, the program's input is
    empty, and typed bytes are dropped.
    """

    def __init__(self, send: "Send", descriptor: int = -1) -> None:
        self._descriptor = descriptor  # -1 if no process reads typed bytes
        self._send = send
        self._unwritten = bytearray()
        self._owes_answer = False  # whether the launcher waits for KEYS_READ
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._check_at = float("inf")
        if descriptor >= 0:
            os.set_blocking(descriptor, False)

    def become_stdin(self, out: int, err: int) -> tuple[int, int]:
        """Move this child process to a new process group or session, and set its stdin.

        Returns:
            The descriptors for the child's stdout and stderr: terminals instead of ``out`` and
            ``err``, if the program's output goes to terminals.
        """
        os.setpgid(0, 0)
        # /dev/null replaces stdin, because stdin from Open MPI 5 never ends in instance 0.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return out, err

    def ended(self) -> None:
        """After the program's end, tell the launcher how much input the program has not read."""

    def type(self, keys: bytes) -> None:
        """Pass typed bytes on to the program; empty bytes end the program's input."""
        if self._descriptor >= 0:
            self._unwritten += keys or self._end_input()
        elif keys:
            self._report_unread(len(keys))
        self._owes_answer = True
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._advance()

    def on_time(self, now: float) -> None:
        """Check whether the program has read its input, if a check is due."""
        if now >= self._check_at:
            self._advance()

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; infinity for never."""
        return self._check_at

    def _advance(self) -> None:
        try:
            if self._unwritten:
                del self._unwritten[: os.write(self._descriptor, self._unwritten)]
        except BlockingIOError:
            pass
        except OSError:
            self._unwritten.clear()  # no process reads the program's input any more
        if self._unwritten or not self._is_read():
            self._check_at = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        else:
            self._check_at = float("inf")
            if self._owes_answer:
                self._owes_answer = False
                self._send(control_protocol.KEYS_READ, None)

    def _end_input(self) -> bytes:
        """Close the program's input, or return the bytes, such as Ctrl-D, that end the input."""
        raise NotImplementedError

    def _report_unread(self, count: int) -> None:
        """Handle ``count`` bytes of input that the program had not read when it ended."""

    def _is_read(self) -> bool:
        """Return whether the program has read all input that it was given."""
        return True


class ProgramPipe(TypedInput):
    """A pipe for the keyboard input of a program."""

    def __init__(self, send: "Send") -> None:
        # The wrapper keeps the reading end of the pipe open, to count the unread bytes.
        self._read_end, self._write_end = os.pipe()
        super().__init__(send, self._write_end)

    def become_stdin(self, out: int, err: int) -> tuple[int, int]:
        """Make the pipe the standard input of this child process, in a new process group."""
        os.setpgid(0, 0)
        os.dup2(self._read_end, 0)
        return out, err

    def ended(self) -> None:
        """Tell the launcher how many bytes the program had not read, and close the pipe."""
        unread = fcntl.ioctl(self._read_end, termios.FIONREAD, b"\0" * 4)
        self._report_unread(len(self._unwritten) + int.from_bytes(unread, sys.byteorder))
        self._unwritten.clear()
        self._close()
        os.close(self._read_end)

    def _report_unread(self, count: int) -> None:
        if count:
            self._send(control_protocol.UNREAD, count)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _end_input(self) -> bytes:
        self._close()
        return b""


class ProgramTerminal(TypedInput):
    """The controlling terminal of a program, for its input and usually for its output."""

    def __init__(self, setup: "dict[str, Any]", send: "Send", add_output: "AddOutput") -> None:
        self._pty = Pty(setup, self._on_control)
        super().__init__(send, self._pty.master)
        # stderr gets a second terminal, because text on stderr has its own tag and files.
        self._error = Pty(setup, lambda _: None) if setup["is_stderr"] else None
        self._is_stdout = setup["is_stdout"]
        add_output(self._pty, setup["stream"].encode())
        if self._error is not None:
            add_output(self._error, control_protocol.STDERR)

    @property
    def number(self) -> int:
        """The number N in the terminal's path ``/dev/pts/N``."""
        return int(os.path.basename(os.ttyname(self._pty.slave)))

    def resize(self, size: "list[int]") -> None:
        """Set the rows and columns of the program's terminals."""
        self._pty.resize(size)
        if self._error is not None:
            self._error.resize(size)

    def become_stdin(self, out: int, err: int) -> tuple[int, int]:
        """Make this terminal the child's stdin and the controlling terminal of a new session."""
        os.setsid()
        fcntl.ioctl(self._pty.slave, termios.TIOCSCTTY, 0)
        os.dup2(self._pty.slave, 0)
        return (
            self._pty.slave if self._is_stdout else out,
            self._error.slave if self._error is not None else err,
        )

    def ended(self) -> None:
        """Drop keyboard input from now on, and close the program's side of the terminals."""
        self._descriptor = -1
        self._pty.ended()
        if self._error is not None:
            self._error.ended()

    def _on_control(self, control: int) -> None:
        """Tell the launcher which terminal modes the program has set."""
        if not control & _PKT_IOCTL:
            return
        is_flushed = bool(control & _PKT_FLUSHREAD)
        if is_flushed:
            self._unwritten.clear()
        modes = self._pty.modes()
        if not modes[_LFLAG] & _EXTPROC:
            modes[_LFLAG] |= _EXTPROC
            termios.tcsetattr(self._pty.master, termios.TCSANOW, modes)
        codes = [code if isinstance(code, int) else code[0] for code in modes[_CC]]
        flags = [modes[_IFLAG], modes[_OFLAG], modes[_LFLAG] & ~_EXTPROC]
        self._send(control_protocol.TERMINAL_MODES, [*flags, codes, is_flushed])
        if self._owes_answer:
            self._advance()

    def _end_input(self) -> bytes:
        modes = self._pty.modes()
        if not modes[_LFLAG] & termios.ICANON:
            return _CTRL_D
        code: bytes = modes[_CC][termios.VEOF]
        return _CTRL_D if code == b"\0" else code

    def _is_read(self) -> bool:
        # In canonical mode, a program reads line by line, so at most the last line is unread.
        if self._pty.slave < 0 or not self._pty.modes()[_LFLAG] & termios.ICANON:
            return True
        # Without this poll, the kernel delivers written bytes to the program with a delay.
        poll = select.poll()
        poll.register(self._pty.slave, select.POLLIN)
        poll.poll(0)
        unread = fcntl.ioctl(self._pty.slave, termios.FIONREAD, b"\0\0\0\0")
        return unread == b"\0\0\0\0"


class Pty:
    """A pseudo-terminal.

    Args:
        setup: The ``modes`` and ``size`` of the terminal, as in the settings of ``ProgramInput``.
        on_control: The function that is called with the kernel's control byte when the program
            changes the terminal's modes.

    Raises:
        OSError: All terminals of the system are in use.
    """

    def __init__(self, setup: "dict[str, Any]", on_control: "Callable[[int], None]") -> None:
        self.master, self.slave = os.openpty()
        self._on_control = on_control
        modes = termios.tcgetattr(self.slave)
        modes[_IFLAG], modes[_OFLAG], modes[_LFLAG] = setup["modes"][:3]
        modes[_LFLAG] |= _EXTPROC
        modes[_CC] = [bytes([code]) for code in setup["modes"][3]]
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        self.resize(setup["size"])
        fcntl.ioctl(self.master, termios.TIOCPKT, b"\1\0\0\0")

    def resize(self, size: "list[int]") -> None:
        """Set the rows and columns; the kernel sends SIGWINCH to the programs of the terminal."""
        if self.slave >= 0:
            termios.tcsetwinsize(self.master, (size[0], size[1]))

    def modes(self) -> "list[Any]":
        """Return the attributes of the terminal, which the program may have set."""
        return termios.tcgetattr(self.master)

    def fileno(self) -> int:
        """Return the descriptor of this process's side of the terminal."""
        return self.master

    def read(self, size: int) -> bytes | None:
        """Return the program's new output: None if there is none yet, empty bytes after its end."""
        data = bytearray()
        while len(data) < size or (data.endswith(b"\r") and len(data) < 2 * size):
            try:
                packet = os.read(self.master, size)
            except BlockingIOError:
                break
            except OSError:
                if data:
                    break
                return b""
            if packet.startswith(b"\0"):
                data += packet[1:]
            elif packet:
                self._on_control(packet[0])
        flags = self.modes()[_OFLAG]
        if flags & termios.OPOST and flags & termios.ONLCR:
            # The \r before each \n is removed, so that output files have the same content as with a
            # pipe. The user's terminal adds the \r again.
            data = data.replace(b"\r\n", b"\n")
        return bytes(data) or None

    def ended(self) -> None:
        """Close the program's side of the terminal; other processes may keep it open."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def close(self) -> None:
        """Close both sides of the terminal."""
        self.ended()
        os.close(self.master)
