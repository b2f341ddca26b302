"""What a program reads when the launcher passes its own input on: a pseudo-terminal, or a pipe.

Runs in the wrapper, which loads this only for a job that has a keyboard: standard library only.
The terminal's line discipline neither echoes nor edits (EXTPROC): the user's own terminal does so,
and is told when the program changes the modes (packet mode), as telnet's LINEMODE does.
"""

import fcntl
import os
import select
import sys
import termios
import time

from poprun_py.instance import control_protocol

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHUNK = 1 << 16
# linux/termbits.h and linux/tty.h: Python's termios lacks them.
_EXTPROC = 0o200000
_PKT_FLUSHREAD, _PKT_IOCTL = 0x01, 0x40
_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
_CTRL_D = b"\x04"
# Between two looks whether the program has read a line.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.25


def make_input(
    setup: "dict[str, Any]", send: "Callable[[bytes, Any], None]"
) -> "ProgramTerminal | ProgramPipe":
    """Return what the program reads, as the launcher wants it.

    Args:
        setup: of a terminal its ``modes`` (iflag, oflag, lflag, cc), its ``size`` (rows, columns),
            whether stdout and stderr are terminals too (``is_stdout``, ``is_stderr``), and the
            ``stream`` that shows what is written to it; empty for a pipe.
        send: sends a frame to the launcher.

    Raises:
        OSError: the system has none left.
    """
    return ProgramTerminal(setup, send) if setup else ProgramPipe(send)


class _Input:
    """Passes on what was typed, and asks for more once that was read."""

    def __init__(self, descriptor: int, send: "Callable[[bytes, Any], None]") -> None:
        self._descriptor = descriptor  # what is typed is written to it; -1 for no reader
        self._send = send
        self._typed = bytearray()
        self._is_owing = False  # whether the launcher waits for KEYS_READ
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._look_at = float("inf")
        os.set_blocking(descriptor, False)

    def type(self, keys: bytes) -> None:
        """Pass on what was typed; nothing is the end of input."""
        if self._descriptor >= 0:
            self._typed += keys or self._end_of_input()
        elif keys:
            self._leave_unread(len(keys))
        self._is_owing = True
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._advance()

    def on_time(self, now: float) -> None:
        """Look again whether the program has read."""
        if now >= self._look_at:
            self._advance()

    def next_deadline(self) -> float:
        """Return when ``on_time`` has something to do; inf for never."""
        return self._look_at

    def _advance(self) -> None:
        try:
            if self._typed:
                del self._typed[: os.write(self._descriptor, self._typed)]
        except BlockingIOError:
            pass
        except OSError:
            self._typed.clear()  # nobody reads it
        if self._typed or not self._is_read():
            self._look_at = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        else:
            self._look_at = float("inf")
            if self._is_owing:
                self._is_owing = False
                self._send(control_protocol.KEYS_READ, None)

    def _end_of_input(self) -> bytes:
        """Return what stands for the end of input, or bring it about."""
        raise NotImplementedError

    def _leave_unread(self, count: int) -> None:
        """Handle ``count`` bytes that the program has not read before its end."""

    def _is_read(self) -> bool:
        """Tell whether the program may get more."""
        raise NotImplementedError


class ProgramPipe(_Input):
    """A pipe that the program reads."""

    def __init__(self, send: "Callable[[bytes, Any], None]") -> None:
        self._read_end, self._write_end = os.pipe()
        super().__init__(self._write_end, send)

    def become_stdio(self, out: int, err: int) -> tuple[int, int]:
        """In the child: read from the pipe, in a process group of its own; the rest stays."""
        os.setpgid(0, 0)
        os.dup2(self._read_end, 0)
        return out, err

    def started(self) -> None:
        """Keep the wrapper's reading end open: it shows how much the program has not read."""

    def ended(self) -> None:
        """The program has ended: tell the launcher how many bytes it has not read."""
        unread = fcntl.ioctl(self._read_end, termios.FIONREAD, b"\0" * 4)
        self._leave_unread(len(self._typed) + int.from_bytes(unread, sys.byteorder))
        self._typed.clear()
        self._close()
        os.close(self._read_end)

    def _leave_unread(self, count: int) -> None:
        if count:
            self._send(control_protocol.UNREAD, count)

    def _close(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = self._descriptor = -1

    def _end_of_input(self) -> bytes:
        self._close()
        return b""

    def _is_read(self) -> bool:
        return True


class Pty:
    """A pseudo-terminal, and what a program writes to it.

    Args:
        setup: the first ``modes`` and the ``size`` as ``make_input`` takes them.
        on_control: takes the byte of the kernel that says what the program did to its terminal;
            None for a terminal that is only written to.

    Raises:
        OSError: the system has none left.
    """

    def __init__(
        self, setup: "dict[str, Any]", on_control: "Callable[[int], None] | None" = None
    ) -> None:
        self.master, self.slave = os.openpty()
        self._on_control = on_control
        os.set_blocking(self.master, False)
        modes = termios.tcgetattr(self.slave)
        modes[_IFLAG], modes[_OFLAG], modes[_LFLAG] = setup["modes"][:3]
        modes[_LFLAG] |= _EXTPROC
        modes[_CC] = [bytes([code]) for code in setup["modes"][3]]
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)
        self.resize(setup["size"])
        if on_control is not None:
            fcntl.ioctl(self.master, termios.TIOCPKT, b"\1\0\0\0")

    def resize(self, size: "list[int]") -> None:
        """Give the terminal its rows and columns; programs that it controls get SIGWINCH."""
        if self.slave >= 0:
            termios.tcsetwinsize(self.master, (size[0], size[1]))

    def modes(self) -> "list[Any]":
        """Return the attributes that the program has set."""
        return termios.tcgetattr(self.master)

    def read(self) -> bytes | None:
        """Return what was written by now; None for nothing, empty at the end."""
        data = bytearray()
        while len(data) < _CHUNK or (data.endswith(b"\r") and len(data) < 2 * _CHUNK):
            try:
                packet = os.read(self.master, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                if data:
                    break
                return b""
            if self._on_control is None or not packet:
                data += packet
            elif packet[0]:
                self._on_control(packet[0])
            else:
                data += packet[1:]
        flags = self.modes()[_OFLAG]
        if flags & termios.OPOST and flags & termios.ONLCR:
            # As a pipe gives it, for files and for lines; the user's terminal maps it again.
            data = data.replace(b"\r\n", b"\n")
        return bytes(data) or None

    def ended(self) -> None:
        """The program has ended: the terminal ends with the last process that has it open."""
        if self.slave >= 0:
            os.close(self.slave)
            self.slave = -1

    def close(self) -> None:
        """Nothing more comes from it."""
        self.ended()
        os.close(self.master)


class ProgramTerminal(_Input):
    """The terminal that controls a program: it reads it, and usually writes to it as well."""

    def __init__(self, setup: "dict[str, Any]", send: "Callable[[bytes, Any], None]") -> None:
        self._pty = Pty(setup, self._on_control)
        super().__init__(self._pty.master, send)
        self.master = self._pty.master
        self._is_stdout = setup["is_stdout"]
        # Kinds of frames, by the descriptor from which what they hold is read.
        self.streams = {self.master: setup["stream"].encode()}
        self.ptys = {self.master: self._pty}
        self._error: Pty | None = None
        if setup["is_stderr"]:
            # A terminal of its own: what goes to stderr is tagged, kept and reported as such.
            self._error = Pty(setup)
            self.streams[self._error.master] = control_protocol.STDERR
            self.ptys[self._error.master] = self._error

    @property
    def number(self) -> int:
        """N of ``/dev/pts/N``."""
        return int(os.path.basename(os.ttyname(self._pty.slave)))

    def resize(self, size: "list[int]") -> None:
        """Give the terminals their rows and columns."""
        for pty in self.ptys.values():
            pty.resize(size)

    def become_stdio(self, out: int, err: int) -> tuple[int, int]:
        """In the child: read from the terminal, which controls this new session.

        Returns:
            What are to be stdout and stderr: terminals, or ``out`` and ``err``.
        """
        os.setsid()
        fcntl.ioctl(self._pty.slave, termios.TIOCSCTTY, 0)
        os.dup2(self._pty.slave, 0)
        return (
            self._pty.slave if self._is_stdout else out,
            self._error.slave if self._error is not None else err,
        )

    def started(self) -> None:
        """In the wrapper: nothing changes. Our own end of it shows what was not read yet."""

    def ended(self) -> None:
        """The program has ended: what is typed now has no reader."""
        self._descriptor = -1
        for pty in self.ptys.values():
            pty.ended()

    def _on_control(self, what: int) -> None:
        """Tell the launcher which modes the program wants."""
        if not what & _PKT_IOCTL:
            return
        if what & _PKT_FLUSHREAD:
            self._typed.clear()
        modes = self._pty.modes()
        if not modes[_LFLAG] & _EXTPROC:
            modes[_LFLAG] |= _EXTPROC
            termios.tcsetattr(self.master, termios.TCSANOW, modes)
        codes = [code if isinstance(code, int) else code[0] for code in modes[_CC]]
        flags = [modes[_IFLAG], modes[_OFLAG], modes[_LFLAG] & ~_EXTPROC]
        self._send(control_protocol.TERMINAL_MODES, [*flags, codes, bool(what & _PKT_FLUSHREAD)])
        if self._is_owing:
            self._advance()

    def _end_of_input(self) -> bytes:
        modes = self._pty.modes()
        if not modes[_LFLAG] & termios.ICANON:
            return _CTRL_D
        code: bytes = modes[_CC][termios.VEOF]
        return _CTRL_D if code == b"\0" else code

    def _is_read(self) -> bool:
        """Lines are passed on one by one: a reader gets one at a time, as from any terminal."""
        if self._pty.slave < 0 or not self._pty.modes()[_LFLAG] & termios.ICANON:
            return True
        # The kernel moves what was written a little later; whoever polls has it moved at once.
        poll = select.poll()
        poll.register(self._pty.slave, select.POLLIN)
        poll.poll(0)
        unread = fcntl.ioctl(self._pty.slave, termios.FIONREAD, b"\0\0\0\0")
        return unread == b"\0\0\0\0"
