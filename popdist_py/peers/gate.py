"""The gate: those who connect to this process, until they have shown that they are of the job.

All are heard beside one another, so that who says nothing delays nobody. They are few at a time,
each for a short time, and no more is read of them than a greeting is long. Over a Unix socket the
kernel says whose process has connected; over TCP the greeting shows it.

Nothing here decides where to listen, or what is said afterwards.
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

__all__ = ["GREETING_SECONDS", "Gate", "Guest", "peer_of", "refusal"]

# A greeting is one round trip; a process may have to wait for its turn meanwhile.
GREETING_SECONDS = 10.0
# So many strangers have room beside those who are expected.
_MOST_STRANGERS = 64
# So many are accepted before those are heard who are there already.
_AT_ONCE = 32
_PEER = struct.Struct("3i")  # pid, user, group


@dataclass(frozen=True)
class Guest:
    """Who has been let in.

    Attributes:
        connection: with it; it does not block.
        claim: what it says of itself.
        pid: of it; 0 on another host.
    """

    connection: socket.socket
    claim: bytes
    pid: int


@dataclass(eq=False)
class _Stranger:
    """Who has connected, from where and when, and what it has said and was told."""

    connection: socket.socket
    source: str
    is_near: bool
    pid: int
    since: float
    heard: bytes = b""
    called: bytes = b""
    nonce: bytes = b""


class Gate:
    """Accepts connections, and lets in those of the job.

    Args:
        secret: of the job, which callers over TCP must know.
        claim_bytes: how long the claim of a caller is.
        expected: how many are expected at a time.
        tell: takes, once, whom the first connection was of that was turned away.
        seconds: for a greeting.
        clock: returns seconds.
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
        self._most = expected + _MOST_STRANGERS
        self._tell: Callable[[str], None] | None = tell
        self._seconds = seconds
        self._clock = clock
        self._poll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        # By descriptor, in the order in which they have come.
        self._strangers: dict[int, _Stranger] = {}

    @property
    def listeners(self) -> Iterable[socket.socket]:
        """The sockets that others connect to."""
        return self._listeners.values()

    @property
    def has_strangers(self) -> bool:
        """Whether somebody has connected who has not been let in."""
        return bool(self._strangers)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to serve."""
        return self._poll.fileno()

    def listen(self, listener: socket.socket) -> None:
        """Accept those who connect to a socket; it is closed with the gate."""
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._poll.register(listener, select.EPOLLIN)

    def serve(self) -> list[Guest]:
        """Do what can be done without waiting, and return who has been let in.

        Raises:
            OSError: nobody can be accepted any more: this process has no descriptor left.
        """
        guests: list[Guest] = []
        if self._poll.closed:
            return guests
        for descriptor, _ in self._poll.poll(0):
            if listener := self._listeners.get(descriptor):
                guests += self._accept(listener)
            elif stranger := self._strangers.get(descriptor):
                guests += self._hear(stranger)
        late = self._clock() - self._seconds
        for stranger in [each for each in self._strangers.values() if each.since < late]:
            self._turn_away(stranger)
        return guests

    def close(self) -> None:
        """Close what listens, and the connections of those who were not let in."""
        strangers = [each.connection for each in self._strangers.values()]
        for connection in [*self._listeners.values(), *strangers]:
            connection.close()
        self._listeners.clear()
        self._strangers.clear()
        self._poll.close()

    def say_to_neighbours(self, words: bytes) -> None:
        """Say something to those of this host who have connected and were not let in."""
        for listener in list(self._listeners.values()):
            with suppress(OSError):
                self._accept(listener)
        for stranger in self._strangers.values():
            if stranger.is_near:
                with suppress(OSError):
                    stranger.connection.send(words)

    # --- Strangers ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> list[Guest]:
        guests = []
        for _ in range(_AT_ONCE):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # it has gone already
                if not self._strangers:
                    raise
                self._turn_away(self._first_of_most())
                continue
            connection.setblocking(False)
            is_near = connection.family == socket.AF_UNIX
            pid, user = peer_of(connection) if is_near else (0, os.geteuid())
            source = f"a process of user {user}" if is_near else str(address[0])
            stranger = _Stranger(connection, source, is_near, pid, self._clock())
            if len(self._strangers) >= self._most:
                self._turn_away(self._first_of_most())
            self._strangers[connection.fileno()] = stranger
            self._poll.register(connection, select.EPOLLIN)
            if user != os.geteuid():
                self._turn_away(stranger)
                continue
            if not is_near:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guests += self._hear(stranger)
        return guests

    def _first_of_most(self) -> _Stranger:
        """Return the first of those who have the most connections: others keep theirs."""
        busiest = Counter(each.source for each in self._strangers.values()).most_common(1)[0][0]
        return next(each for each in self._strangers.values() if each.source == busiest)

    def _hear(self, stranger: _Stranger) -> list[Guest]:
        """Take what a stranger says, and return it as a guest once it has said enough."""
        try:
            while (guest := self._step(stranger)) is None:
                pass
        except BlockingIOError:
            return []
        except (OSError, greeting.RefusedError):
            self._turn_away(stranger)
            return []
        del self._strangers[stranger.connection.fileno()]
        self._poll.unregister(stranger.connection)
        return [guest]

    def _step(self, stranger: _Stranger) -> Guest | None:
        """Read once, and say what is to be said.

        Raises:
            BlockingIOError: nothing more has come.
            OSError: the connection has ended.
            greeting.RefusedError: the stranger does not know the secret.
        """
        connection, is_near = stranger.connection, stranger.is_near
        wanted = greeting.NONCE_BYTES
        if is_near or stranger.called:
            wanted = self._claim_bytes + (0 if is_near else greeting.PROOF_BYTES)
        data = connection.recv(wanted - len(stranger.heard))
        if not data:
            raise ConnectionError
        stranger.heard += data
        if len(stranger.heard) < wanted:
            return None
        if is_near:
            return Guest(connection, stranger.heard, stranger.pid)
        if not stranger.called:
            stranger.called, stranger.heard = stranger.heard, b""
            stranger.nonce = os.urandom(greeting.NONCE_BYTES)
            connection.send(greeting.answer(self._secret, stranger.called, stranger.nonce))
            return None
        claim = greeting.claim_of(self._secret, stranger.called, stranger.nonce, stranger.heard)
        connection.send(greeting.LET_IN)
        return Guest(connection, claim, 0)

    def _turn_away(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        stranger.connection.close()
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(refusal(stranger.source))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket, as the kernel says."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(peer)
    return pid, user


def refusal(source: str) -> str:
    """Return a sentence about who was turned away."""
    return (
        f"{source} has connected and is not of this job: it was turned away; others like it are "
        "not told of"
    )
