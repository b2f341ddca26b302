"""Where the ranks of a group reach one another for messages, without waiting for one another.

A rank publishes in the store where it is reached: within the host an abstract Unix socket, and once
it has seen that the group spans hosts a TCP port as well. Whoever connects sends the secret that
was published with the address; every other connection is closed.

Nothing here knows messages.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from popdist_py.collectives.between_hosts import tcp_connect
from popdist_py.collectives.communicators import meeting_communicator

__all__ = ["Endpoint", "Guest", "place_of_this_process"]

_SECRET_BYTES = 16
_GREETING = struct.Struct(f"<{_SECRET_BYTES}sIQ")  # secret, rank, address of the probe
_PEER = struct.Struct("3i")  # pid, user, group
_GREETING_SECONDS = 10.0


def place_of_this_process() -> str:
    """Return what is equal for processes that reach one another's Unix sockets, "" if unknown."""
    place = meeting_communicator.place_of_this_process()
    try:
        return place and f"{place} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115
    except OSError:
        return ""


@dataclass(frozen=True)
class _Card:
    """What a rank publishes when it joins the group."""

    place: str
    host: str
    unix: str
    secret: str


@dataclass(frozen=True)
class Guest:
    """Who has connected to this rank.

    Attributes:
        rank: of the other process.
        connection: with it.
        pid: of it, 0 on another host.
        probe: address of a number in its memory.
    """

    rank: int
    connection: socket.socket
    pid: int
    probe: int


class Endpoint:
    """What listens for the other ranks, and connects to them; no call waits for one of them.

    Args:
        store: torch's, of this group alone.
        rank: of this process.
        size: number of ranks.
        network: interface or CIDR that all hosts are on; None: the one of the host's name.

    Attributes:
        is_settled: whether all ranks are known, and this one listens where they reach it.
    """

    def __init__(self, store: Any, rank: int, size: int, network: str | None) -> None:
        self._store, self._rank, self._size, self._network = store, rank, size, network
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        unix = f"popdist-{secrets.token_hex(16)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._unix.bind(f"\0{unix}")
        self._unix.listen(socket.SOMAXCONN)
        self._tcp: socket.socket | None = None
        self.is_settled = False
        self._cards: dict[int, _Card] = {}
        self._strangers: dict[socket.socket, float] = {}
        # A forked child would keep on listening after this process has ended.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))
        self._card = _Card(place_of_this_process(), socket.gethostname(), unix, self._secret.hex())
        store.set(_key(rank), json.dumps(vars(self._card)))

    def use_store_beside_others(self) -> None:
        """Use a connection of its own: another thread may wait in that of the group."""
        with suppress(AttributeError, NotImplementedError, RuntimeError):  # older than 2.6
            self._store = self._store.clone()

    @property
    def listeners(self) -> list[socket.socket]:
        """The sockets that others connect to."""
        return [self._unix] + ([self._tcp] if self._tcp is not None else [])

    @property
    def has_strangers(self) -> bool:
        """Whether somebody has connected who has not sent the greeting."""
        return bool(self._strangers)

    def _is_near(self, card: _Card) -> bool:
        return bool(card.place) and card.place == self._card.place

    def settle(self) -> socket.socket | None:
        """Look who has joined; return what other hosts can connect to by now, if it is new."""
        cards = [self._card_of(rank) for rank in range(self._size)]
        if self.is_settled or None in cards:
            return None
        self.is_settled = True
        known = [card for card in cards if card is not None]
        if all(self._is_near(card) for card in known if card != self._card):
            return None
        address = tcp_connect.own_address(self._network, {card.host for card in known})
        if address is not None:
            self._tcp = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
            self._tcp.setblocking(False)
        reached_at = self._tcp.getsockname() if self._tcp is not None else ()
        self._store.set(f"{_key(self._rank)}/tcp", json.dumps(reached_at))
        return self._tcp

    def _card_of(self, rank: int) -> _Card | None:
        if rank not in self._cards and (value := self._look_up(_key(rank))) is not None:
            self._cards[rank] = _Card(**value)
        return self._cards.get(rank)

    def connect(self, rank: int, probe: int) -> tuple[socket.socket, bytes] | None:
        """Return a connection to a rank, and what must be sent first; None if it is not known yet.

        Args:
            rank: of the other process.
            probe: address of a number in the memory of this one.

        Raises:
            OSError: the rank cannot be reached.
        """
        card = self._card_of(rank)
        if card is None:
            return None
        greeting = _GREETING.pack(bytes.fromhex(card.secret), self._rank, probe)
        if self._is_near(card):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(f"\0{card.unix}")
            except OSError:
                connection.close()
                raise
            connection.setblocking(False)
            return connection, greeting
        address = self._look_up(f"{_key(rank)}/tcp")
        if address is None:
            return None
        if not address:
            raise OSError(f"rank {rank} has no address that other hosts reach")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.connect_ex(tuple(address))
        return connection, greeting

    def accept(self) -> list[socket.socket]:
        """Accept who has connected; each must send a greeting before ``welcome`` knows it."""
        accepted = []
        for listener in self.listeners:
            try:
                while True:
                    connection = listener.accept()[0]
                    connection.setblocking(False)
                    self._strangers[connection] = time.monotonic()
                    accepted.append(connection)
            except OSError:
                pass
        return accepted

    def welcome(self) -> list[Guest]:
        """Return those who have sent the greeting; close the connections of those who do not."""
        guests = []
        for connection, since in list(self._strangers.items()):
            has_ended = False
            try:
                data = connection.recv(_GREETING.size, socket.MSG_PEEK)
                has_ended = not data
            except BlockingIOError:
                data = b""
            except OSError:
                data, has_ended = b"", True
            is_late = has_ended or time.monotonic() - since > _GREETING_SECONDS
            if len(data) < _GREETING.size and not is_late:
                continue
            del self._strangers[connection]
            guest = self._guest(connection, data)
            if guest is None:
                connection.close()
            else:
                guests.append(guest)
        return guests

    def _guest(self, connection: socket.socket, data: bytes) -> Guest | None:
        if len(data) < _GREETING.size:
            return None
        secret, rank, probe = _GREETING.unpack(data)
        pid, user = 0, os.geteuid()
        if connection.family == socket.AF_UNIX:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            pid, user, _ = _PEER.unpack(peer)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        is_known = hmac.compare_digest(secret, self._secret) and user == os.geteuid()
        if not is_known or rank >= self._size or rank == self._rank:
            return None
        connection.recv(_GREETING.size)
        return Guest(rank, connection, pid, probe)

    def close(self, farewell: bytes = b"") -> None:
        """Stop to listen.

        Args:
            farewell: for those who have connected and were not welcomed.
        """
        for connection in self.accept() if farewell else []:
            with suppress(OSError):
                connection.send(farewell)
        for connection in [*self.listeners, *self._strangers]:
            connection.close()
        self._strangers.clear()

    def _look_up(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:  # the process that holds the store has ended
            return None


def _close(reference: weakref.ref[Endpoint]) -> None:
    endpoint = reference()
    if endpoint is not None:
        endpoint.close()


def _key(rank: int) -> str:
    return f"messages/{rank}"
