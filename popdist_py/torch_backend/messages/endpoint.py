"""Addresses of the ranks of a group, and connections between the ranks.

The functions of this module do not wait for other ranks. Each rank publishes the name of an
abstract Unix socket in the group's store. If the ranks of the group are on several hosts, each rank
also publishes a TCP address. On a Unix socket, the kernel tells each side the process and the user
of the other side. Over TCP, both sides prove that they know two secrets: a secret from the store,
and the job's secret.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from popdist_py.collectives.between_hosts import tcp_connect
from popdist_py.collectives.communicators import join
from popdist_py.collectives.waiting import WaitTime
from popdist_py.environment import job_secret
from popdist_py.peers.calls import Calls
from popdist_py.peers.gate import Gate, peer_of
from popdist_py.peers.greeting import joined
from popdist_py.peers.silence import keep_alive

__all__ = ["Endpoint", "Guest", "place_of_this_process"]

_SECRET_BYTES = 16
_CLAIM = struct.Struct("<IQ")  # the caller's rank, and the address of its probe


def place_of_this_process() -> str:
    """Return an id that is equal in all processes that can reach the same Unix sockets.

    The id is "" if it cannot be determined.
    """
    place = join.place_of_this_process()
    try:
        return place and f"{place} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115
    except OSError:
        return ""


@dataclass(frozen=True)
class _Card:
    """The addresses that a rank publishes when it makes the group."""

    place: str
    host: str
    unix: str
    secret: str


@dataclass(frozen=True)
class Guest:
    """Another rank that has connected to this rank.

    Attributes:
        rank: The rank of the other process.
        connection: The connection with the other process.
        pid: The process id of the other process; 0 on another host.
        probe: The address of a known number in the memory of the other process. This rank reads the
            number to test whether it can read that memory.
    """

    rank: int
    connection: socket.socket
    pid: int
    probe: int


class Endpoint:
    """Accepts connections from the other ranks and connects to them, without waiting for any rank.

    Args:
        store: The store that torch made for this group.
        rank: The rank of this process.
        size: The number of ranks.
        network: Interface or CIDR of the network between the hosts; None to choose a network
            automatically.

    Attributes:
        is_settled: Whether the addresses of all ranks are known and this rank listens on TCP if
            necessary.
    """

    def __init__(self, store: Any, rank: int, size: int, network: str | None) -> None:
        self._store, self._rank, self._size, self._network = store, rank, size, network
        secret = secrets.token_bytes(_SECRET_BYTES)
        name = f"popdist-{secrets.token_hex(16)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0{name}")
        unix.listen(socket.SOMAXCONN)
        self._gate = Gate(
            joined(secret, job_secret(os.environ)),
            _CLAIM.size,
            size,
            logging.getLogger("popdist").warning,
            clock=WaitTime().seconds,
        )
        self._gate.listen(unix)
        self._calls: Calls[int] = Calls()
        self.is_settled = False
        self._cards: dict[int, _Card] = {}
        # A forked child closes these sockets. Otherwise the child would keep the sockets open after
        # this process has ended.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))
        self._card = _Card(place_of_this_process(), socket.gethostname(), name, secret.hex())
        store.set(_key(rank), json.dumps(vars(self._card)))

    def use_store_beside_others(self) -> None:
        """Open a second connection to the store, because other threads may block the first."""
        # If the store cannot be cloned, this object continues to use the first connection.
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            self._store = self._store.clone()

    @property
    def descriptors(self) -> tuple[int, int]:
        """Two descriptors to poll: the first for ``welcome``, and the second for ``answers``.

        A descriptor becomes readable when its method must be called.
        """
        return self._gate.fileno(), self._calls.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether a process has connected but not identified itself yet."""
        return self._gate.has_pending

    @property
    def is_calling(self) -> bool:
        """Whether this rank is still opening a connection to a rank on another host."""
        return bool(self._calls)

    def _is_near(self, card: _Card) -> bool:
        return bool(card.place) and card.place == self._card.place

    def settle(self) -> None:
        """Look up the addresses of the other ranks in the store.

        Once the addresses of all ranks are known, listen on TCP if a rank is on another host.
        """
        cards = [self._card_of(rank) for rank in range(self._size)]
        if self.is_settled or None in cards:
            return
        self.is_settled = True
        known = [card for card in cards if card is not None]
        if all(self._is_near(card) for card in known if card != self._card):
            return
        reached_at = ()
        address = self._own_address({card.host for card in known})
        if address is not None:
            listener = tcp_connect.listen_at(address)
            self._gate.listen(listener)
            reached_at = listener.getsockname()[:2]
        self._store.set(f"{_key(self._rank)}/tcp", json.dumps(reached_at))

    def _own_address(self, hosts: set[str]) -> str | None:
        """Return the address at which other hosts reach this host."""
        address = tcp_connect.own_address(self._network, hosts, os.environ.get("MASTER_ADDR"))
        if address is None and not self._network:
            # On the host that MASTER_ADDR names, this name may resolve to the loopback address. In
            # this case, use the address from which this host reaches another host.
            others = sorted(hosts - {self._card.host})
            address = next(filter(None, map(tcp_connect.address_towards, others)), None)
        return address

    def _card_of(self, rank: int) -> _Card | None:
        if rank not in self._cards and (value := self._look_up(_key(rank))) is not None:
            self._cards[rank] = _Card(**value)
        return self._cards.get(rank)

    def connect(self, rank: int, probe: int) -> tuple[socket.socket, bytes] | None:
        """Return a connection to a rank of this host, and the bytes that must be sent first.

        The result is None if the address of the rank is not known yet, if the rank's listen queue
        is full, or if the rank is on another host. For a rank on another host, ``answers`` returns
        the connection later.

        Args:
            rank: The rank of the other process.
            probe: The address of a known number in the memory of this process. The other rank reads
                the number to test whether it can read this memory.

        Raises:
            OSError: The rank cannot be reached.
        """
        card = self._card_of(rank)
        if card is None or rank in self._calls:
            return None
        claim = _CLAIM.pack(self._rank, probe)
        if self._is_near(card):
            neighbour = _neighbour(card)
            return None if neighbour is None else (neighbour, claim)
        address = self._look_up(f"{_key(rank)}/tcp")
        if address is None:
            return None
        if not address:
            raise OSError(f"rank {rank} has no address that other hosts can reach")
        secret = joined(bytes.fromhex(card.secret), job_secret(os.environ))
        self._calls.begin(rank, tuple(address), secret, claim)
        return None

    def answers(self) -> list[tuple[int, socket.socket | None]]:
        """Return each rank on another host to which an attempt to connect has ended.

        Each rank is in a pair with its connection, or with None if the attempt has failed.
        """
        answered = self._calls.serve()
        for _, connection in answered:
            if connection is not None:
                keep_alive(connection)
        return answered

    def welcome(self) -> list[Guest]:
        """Return the connected ranks that have identified themselves; close invalid connections."""
        guests = []
        with suppress(OSError):  # the process has reached its limit of open descriptors
            for each in self._gate.serve():
                rank, probe = _CLAIM.unpack(each.claim)
                if rank >= self._size or rank == self._rank:
                    each.connection.close()
                    continue
                if not each.pid:
                    keep_alive(each.connection)
                guests.append(Guest(rank, each.connection, each.pid, probe))
        return guests

    def close(self, farewell: bytes = b"") -> None:
        """Stop listening. A second call does nothing.

        Args:
            farewell: Bytes that are sent to processes of this host that have connected, but that
                ``welcome`` has not returned yet.
        """
        if farewell:
            self._gate.send_to_local_pending(farewell)
        self._gate.close()
        self._calls.close()

    def _look_up(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:  # the process that serves the store has ended
            return None


def _neighbour(card: _Card) -> socket.socket | None:
    """Return a connection to a rank of this host.

    The result is None while the listen queue of that rank is full. This function does not wait
    until the queue has room, because any user of the host can keep the queue full for a long time.

    Raises:
        OSError: The rank has ended, or another user now listens on the name of the rank's socket.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(f"\0{card.unix}")
        if peer_of(connection)[1] != os.geteuid():
            raise ConnectionRefusedError
    except BlockingIOError:
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    return connection


def _close(reference: weakref.ref[Endpoint]) -> None:
    endpoint = reference()
    if endpoint is not None:
        endpoint.close()


def _key(rank: int) -> str:
    return f"messages/{rank}"
