"""Incoming connections of this process, until their callers are authenticated.

All handshakes proceed at the same time, so a caller that sends nothing does not delay the others.
There are limits for the number of unauthenticated callers, for the duration of a handshake, and for
the bytes that are read from a caller. Over TCP, a handshake (the module ``greeting``) authenticates
a caller. Over a Unix socket, the kernel reports the user and the process of the caller.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from popdist_py.peers import greeting

# The time limit of a handshake. A handshake takes two round trips, but a busy host may delay a
# process for seconds.
GREETING_SECONDS = 10.0
# The number of unauthenticated callers that are accepted in addition to the expected callers.
_EXTRA_PENDING = 64
# The maximum number of new connections to accept before reading data from the open ones.
_AT_ONCE = 32
_PEER = struct.Struct("3i")  # pid, user, group


@dataclass(frozen=True)
class Guest:
    """An authenticated caller.

    Attributes:
        connection: The connection with the caller, which is non-blocking.
        claim: The bytes with which the caller identifies itself.
        pid: The process id of the caller; 0 for a caller over TCP.
    """

    connection: socket.socket
    claim: bytes
    pid: int


@dataclass(eq=False)
class _Pending:
    """A caller that is not authenticated yet, with the state of its handshake.

    ``source`` names the caller in messages. ``is_local`` means that the caller uses a Unix socket.
    ``since`` is the time when the connection was accepted. ``received`` contains the received part
    of the caller's next message.
    """

    connection: socket.socket
    source: str
    is_local: bool
    pid: int
    since: float
    received: bytes = b""
    caller_nonce: bytes = b""
    nonce: bytes = b""


class Gate:
    """Accepts connections, and authenticates their callers.

    Args:
        secret: The secret of the job, which callers over TCP must know.
        claim_bytes: The number of bytes of a claim, with which a caller identifies itself.
        expected: The number of callers that are expected at the same time.
        tell: A function that is called with a message about the first rejected caller.
        seconds: The time limit of a handshake, in seconds.
        clock: A function that returns the time in seconds.
    """

    def __init__(
        self,
        secret: bytes,
        claim_bytes: int,
        expected: int,
        tell: Callable[[str], None],
        seconds: float = GREETING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._claim_bytes = claim_bytes
        self._most = expected + _EXTRA_PENDING
        self._tell: Callable[[str], None] | None = tell
        self._seconds = seconds
        self._clock = clock
        self._poll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        # The unauthenticated callers by file descriptor, in the order in which they connected.
        self._pending: dict[int, _Pending] = {}

    @property
    def listeners(self) -> Iterable[socket.socket]:
        """The sockets that accept connections."""
        return self._listeners.values()

    @property
    def has_pending(self) -> bool:
        """Whether there are callers that are not authenticated yet."""
        return bool(self._pending)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the caller should call ``serve``."""
        return self._poll.fileno()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket. ``Gate.close`` also closes this socket."""
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._poll.register(listener, select.EPOLLIN)

    def serve(self) -> list[Guest]:
        """Continue all handshakes as far as possible, and return the newly authenticated callers.

        Raises:
            OSError: This process has no file descriptor left for another connection.
        """
        guests: list[Guest] = []
        if self._poll.closed:
            return guests
        for descriptor, _ in self._poll.poll(0):
            if listener := self._listeners.get(descriptor):
                guests += self._accept(listener)
            elif pending := self._pending.get(descriptor):
                guests += self._advance(pending)
        late = self._clock() - self._seconds
        for pending in [each for each in self._pending.values() if each.since < late]:
            self._reject(pending)
        return guests

    def close(self) -> None:
        """Close the listening sockets, and the connections of unauthenticated callers."""
        connections = [each.connection for each in self._pending.values()]
        for connection in [*self._listeners.values(), *connections]:
            connection.close()
        self._listeners.clear()
        self._pending.clear()
        self._poll.close()

    def send_to_local_pending(self, data: bytes) -> None:
        """Send data to the unauthenticated callers that have connected over Unix sockets."""
        for listener in list(self._listeners.values()):
            with suppress(OSError):
                self._accept(listener)
        for pending in self._pending.values():
            if pending.is_local:
                with suppress(OSError):
                    pending.connection.send(data)

    # --- Unauthenticated callers --------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> list[Guest]:
        guests = []
        for _ in range(_AT_ONCE):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # the caller has closed the connection
                if not self._pending:
                    raise
                self._reject(self._first_of_most())
                continue
            connection.setblocking(False)
            is_local = connection.family == socket.AF_UNIX
            pid, user = peer_of(connection) if is_local else (0, os.geteuid())
            source = f"a process of user {user}" if is_local else str(address[0])
            pending = _Pending(connection, source, is_local, pid, self._clock())
            if len(self._pending) >= self._most:
                self._reject(self._first_of_most())
            self._pending[connection.fileno()] = pending
            self._poll.register(connection, select.EPOLLIN)
            if user != os.geteuid():
                self._reject(pending)
                continue
            if not is_local:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guests += self._advance(pending)
        return guests

    def _first_of_most(self) -> _Pending:
        """Return the oldest connection of the address or user that has the most connections."""
        busiest = Counter(each.source for each in self._pending.values()).most_common(1)[0][0]
        return next(each for each in self._pending.values() if each.source == busiest)

    def _advance(self, pending: _Pending) -> list[Guest]:
        """Continue one handshake. Return a list with the caller if it is now authenticated."""
        try:
            while (guest := self._step(pending)) is None:
                pass
        except BlockingIOError:
            return []
        except (OSError, greeting.RefusedError):
            self._reject(pending)
            return []
        del self._pending[pending.connection.fileno()]
        self._poll.unregister(pending.connection)
        return [guest]

    def _step(self, pending: _Pending) -> Guest | None:
        """Read once from a caller, and answer if its message is complete.

        The result is None until the caller is authenticated.

        Raises:
            BlockingIOError: No more data has arrived.
            OSError: The connection has ended.
            greeting.RefusedError: The caller does not know the secret.
        """
        connection, is_local = pending.connection, pending.is_local
        wanted = greeting.NONCE_BYTES
        if is_local or pending.caller_nonce:
            wanted = self._claim_bytes + (0 if is_local else greeting.PROOF_BYTES)
        data = connection.recv(wanted - len(pending.received))
        if not data:
            raise ConnectionError
        pending.received += data
        if len(pending.received) < wanted:
            return None
        if is_local:
            return Guest(connection, pending.received, pending.pid)
        if not pending.caller_nonce:
            pending.caller_nonce, pending.received = pending.received, b""
            pending.nonce = os.urandom(greeting.NONCE_BYTES)
            connection.send(greeting.answer(self._secret, pending.caller_nonce, pending.nonce))
            return None
        proven = pending.received
        claim = greeting.claim_of(self._secret, pending.caller_nonce, pending.nonce, proven)
        connection.send(greeting.LET_IN)
        return Guest(connection, claim, 0)

    def _reject(self, pending: _Pending) -> None:
        del self._pending[pending.connection.fileno()]
        pending.connection.close()
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(refusal(pending.source))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and the user at the other end of a Unix socket."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(peer)
    return pid, user


def refusal(source: str) -> str:
    """Return a message about a rejected caller."""
    return (
        f"{source} has connected and is not of this job: its connection was closed; further "
        "rejected connections are not reported"
    )
