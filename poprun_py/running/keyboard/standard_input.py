"""Functions that hand the launcher's standard input to the instance on this host that reads it.

The instance gets the file descriptor itself and not a copy of the data. The next reader of a file
or pipe therefore finds everything that the program has not read, and the program can read sockets
and pipes of other users as well. Input from a terminal, and input for an instance on another host,
is passed on by keyboard_input.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat


def pass_on(channel: socket.socket) -> None:
    """Send the file descriptor of standard input over a Unix socket.

    If standard input cannot be read, send a descriptor of /dev/null. For example, ``nohup`` gives
    its command a standard input that can only be written.
    """
    descriptor, opened = 0, -1
    if not _is_readable():
        descriptor = opened = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Sending fails if the instance has ended.
        with contextlib.suppress(OSError):
            socket.send_fds(channel, [b"\0"], [descriptor])
    finally:
        if opened >= 0:
            os.close(opened)


def _is_readable() -> bool:
    try:
        return fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        return False


def position() -> int | None:
    """Return the position in the file that is standard input; None if it is not a file."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else None
    except OSError:
        return None


def rewind(before: int | None) -> None:
    """Move standard input back to position ``before``, so that a restarted job reads it again."""
    if before is not None:
        with contextlib.suppress(OSError):
            os.lseek(0, before, os.SEEK_SET)
