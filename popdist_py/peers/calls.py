"""Calls: those whom this process connects to over TCP, until both ends have shown who they are.

Who is turned away calls again: a listener that strangers crowd cannot tell whom it does so to.

Nothing here chooses an address, or knows what is said afterwards.
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

__all__ = ["Calls"]

Name = TypeVar("Name", bound=Hashable)

_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class _Call(Generic[Name]):
    """A connection that is made: to whom, with what to say, and what was said and heard."""

    name: Name
    address: tuple[str, int]
    secret: bytes
    claim: bytes
    connection: socket.socket | None = None
    again_at: float = 0.0
    nonce: bytes = b""
    is_shown: bool = False
    heard: bytes = b""


class Calls(Generic[Name]):
    """The calls of this process; no method waits for anybody."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._calls: dict[Name, _Call[Name]] = {}
        self._names: dict[int, Name] = {}

    def __contains__(self, name: Name) -> bool:
        """Whether this is called, and has neither let this process in nor refused."""
        return name in self._calls

    def __bool__(self) -> bool:
        return bool(self._calls)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to serve."""
        return self._poll.fileno()

    def begin(self, name: Name, address: tuple[str, int], secret: bytes, claim: bytes) -> None:
        """Call somebody.

        Args:
            name: of the call, by which ``serve`` returns it.
            address: where to.
            secret: which both know.
            claim: what this process says of itself.

        Raises:
            OSError: there is no way to this address.
        """
        call = _Call(name, address, secret, claim)
        self._connect(call)
        self._calls[name] = call

    def serve(self) -> list[tuple[Name, socket.socket | None]]:
        """Do what can be done without waiting, and return the calls that have ended.

        Each is its name, and a connection that does not block; None where nobody is reached who
        knows the secret.
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
        """Give up the calls."""
        for call in self._calls.values():
            if call.connection is not None:
                call.connection.close()
        self._calls.clear()
        self._names.clear()
        self._poll.close()

    def _due(self) -> list[_Call[Name]]:
        """Return the calls that something has come for, and those that are to be made again."""
        if self._poll.closed:
            return []
        now = time.monotonic()
        heard = [self._calls[self._names[descriptor]] for descriptor, _ in self._poll.poll(0)]
        away = [each for each in self._calls.values() if each.connection is None]
        return heard + [each for each in away if now >= each.again_at]

    def _connect(self, call: _Call[Name]) -> None:
        call.nonce, call.is_shown, call.heard = b"", False, b""
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
        """Say or read what comes next, and tell whether this process has been let in.

        Raises:
            BlockingIOError: nothing more has come.
            OSError: nobody is there.
            ConnectionResetError: somebody is there, and has turned this process away.
            greeting.RefusedError: who is there does not know the secret.
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
        wanted = len(greeting.LET_IN) if call.is_shown else greeting.ANSWER_BYTES
        data = connection.recv(wanted - len(call.heard))
        if not data:
            raise ConnectionResetError
        call.heard += data
        if len(call.heard) < wanted:
            return False
        if call.is_shown:
            return True
        connection.send(greeting.proof(call.secret, call.nonce, call.heard, call.claim))
        call.is_shown, call.heard = True, b""
        return False

    def _leave(self, call: _Call[Name]) -> socket.socket | None:
        """Forget a call, and return its connection."""
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
