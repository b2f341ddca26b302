"""The channel between a program and the launcher that it started: messages on a pair of sockets.

A message is its length in four bytes, and a kind with a value, pickled: both ends are processes of
one user that share an inherited socket, which nobody else can open. What an instance says never
passes here but as text and numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
from typing import Any

_HEADER_BYTES = 4
_LAST_STREAM = 2


class Channel:
    """One end of the channel.

    Args:
        end: a connected socket, which is closed with the channel.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return both ends of a new channel."""
        one, other = socket.socketpair()
        return cls(_beyond_streams(one)), cls(_beyond_streams(other))

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """Return the end that this process was started with."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message, or the end, has come."""
        return self._socket.fileno()

    def send(self, kind: str, value: object = None) -> None:
        """Send a message; where nobody is left to read it, nothing happens."""
        data = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)

    def receive(self) -> tuple[str, Any] | None:
        """Return the next message's kind and value; None if the other end is closed."""
        header = self._exactly(_HEADER_BYTES)
        data = self._exactly(int.from_bytes(header, "big")) if header else b""
        return pickle.loads(data) if data else None

    def _exactly(self, size: int) -> bytes:
        """Return so many bytes; none at all if they never come."""
        data = bytearray()
        try:
            while len(data) < size:
                part = self._socket.recv(size - len(data))
                if not part:
                    return b""
                data += part
        except ConnectionError:
            return b""
        return bytes(data)

    def signal_end(self, number: int) -> None:
        """Let the kernel send this process a signal when the other end closes, or says more."""
        fcntl.fcntl(self._socket, fcntl.F_SETSIG, number)
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._socket, fcntl.F_GETFL)
        fcntl.fcntl(self._socket, fcntl.F_SETFL, flags | os.O_ASYNC)

    @property
    def is_closed(self) -> bool:
        """Whether the other end is closed; only for an end that gets no more messages."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _beyond_streams(end: socket.socket) -> socket.socket:
    """Return a socket that is at none of descriptors 0 to 2, which a daemon may have closed.

    There the standard streams of the launcher's process would take its place.
    """
    if end.fileno() > _LAST_STREAM:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LAST_STREAM + 1))
