"""Outgoing TCP connections of this process, until both ends are authenticated.

A call is an attempt to connect to a listener and to authenticate both ends. A listener with too
many connections closes some of them before it has authenticated their callers. So this module
repeats a call if the listener closes the connection.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from popdist_py.peers import greeting

Name = TypeVar("Name", bound=Hashable)

_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class _Call(Generic[Name]):
    """One attempt to connect to a listener, with the state of its handshake.

    ``connection`` is None while the call waits to be repeated at the time ``again_at``. ``nonce``
    is empty until this process has sent its nonce. ``is_proven`` tells whether this process has
    sent the proof that it knows the secret. ``received`` contains the received part of the
    listener's next message.
    """

    name: Name
    address: tuple[str, int]
    secret: bytes
    claim: bytes
    connection: socket.socket | None = None
    again_at: float = 0.0
    nonce: bytes = b""
    is_proven: bool = False
    received: bytes = b""


class Calls(Generic[Name]):
    """The attempts of this process to connect to listeners. No method waits for the network."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._calls: dict[Name, _Call[Name]] = {}
        self._names: dict[int, Name] = {}

    def __contains__(self, name: Name) -> bool:
        """Return whether the call ``name`` is in progress."""
        return name in self._calls

    def __bool__(self) -> bool:
        return bool(self._calls)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when ``serve`` can continue a call."""
        return self._poll.fileno()

    def begin(self, name: Name, address: tuple[str, int], secret: bytes, claim: bytes) -> None:
        """Begin to connect to a listener.

        Args:
            name: The name of the call. ``serve`` returns this name when the call has ended.
            address: The host and port of the listener.
            secret: The secret that both ends know.
            claim: The bytes that identify this process to the listener.

        Raises:
            OSError: The address cannot be reached.
        """
        call = _Call(name, address, secret, claim)
        self._connect(call)
        self._calls[name] = call

    def serve(self) -> list[tuple[Name, socket.socket | None]]:
        """Continue all calls as far as possible without waiting, and return the ended calls.

        Each item of the list contains the name of an ended call and its non-blocking connection.
        The connection is None if the address cannot be reached, or if the listener does not know
        the secret.
        """
        ended: list[tuple[Name, socket.socket | None]] = []
        for call in self._due():
            try:
                if self._advance(call):
                    ended.append((call.name, self._leave(call)))
            except BlockingIOError:
                pass
            except (ConnectionResetError, BrokenPipeError):
                self._drop(call)
                call.again_at = time.monotonic() + _PAUSE_SECONDS
                self._calls[call.name] = call
            except (OSError, greeting.RefusedError):
                self._drop(call)
                ended.append((call.name, None))
        return ended

    def close(self) -> None:
        """Close the connections of all calls, and forget the calls."""
        for call in self._calls.values():
            if call.connection is not None:
                call.connection.close()
        self._calls.clear()
        self._names.clear()
        self._poll.close()

    def _due(self) -> list[_Call[Name]]:
        """Return the calls that received data, and the calls that must be repeated now."""
        if self._poll.closed:
            return []
        now = time.monotonic()
        readable = [self._calls[self._names[descriptor]] for descriptor, _ in self._poll.poll(0)]
        closed = [each for each in self._calls.values() if each.connection is None]
        return readable + [each for each in closed if now >= each.again_at]

    def _connect(self, call: _Call[Name]) -> None:
        call.nonce, call.is_proven, call.received = b"", False, b""
        family = socket.AF_INET6 if ":" in call.address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with suppress(BlockingIOError):
                connection.connect(call.address)
        except OSError:
            connection.close()
            raise
        call.connection = connection
        self._names[connection.fileno()] = call.name
        self._poll.register(connection, select.EPOLLOUT)

    def _advance(self, call: _Call[Name]) -> bool:
        """Do the next step of the handshake, and return whether the listener accepted the call.

        Raises:
            BlockingIOError: No more data has arrived.
            OSError: The address cannot be reached.
            ConnectionResetError: The listener closed the connection.
            greeting.RefusedError: The listener does not know the secret.
        """
        connection = call.connection
        if connection is None:
            self._connect(call)
            return False
        if not call.nonce:
            nonce = os.urandom(greeting.NONCE_BYTES)
            connection.send(nonce)
            call.nonce = nonce
            self._poll.modify(connection, select.EPOLLIN)
        wanted = len(greeting.LET_IN) if call.is_proven else greeting.ANSWER_BYTES
        data = connection.recv(wanted - len(call.received))
        if not data:
            raise ConnectionResetError
        call.received += data
        if len(call.received) < wanted:
            return False
        if call.is_proven:
            return True
        connection.send(greeting.proof(call.secret, call.nonce, call.received, call.claim))
        call.is_proven, call.received = True, b""
        return False

    def _leave(self, call: _Call[Name]) -> socket.socket | None:
        """Remove a call from the calls in progress, and return its connection."""
        connection, call.connection = call.connection, None
        if connection is not None:
            del self._names[connection.fileno()]
            self._poll.unregister(connection)
        self._calls.pop(call.name, None)
        return connection

    def _drop(self, call: _Call[Name]) -> None:
        connection = self._leave(call)
        if connection is not None:
            connection.close()
