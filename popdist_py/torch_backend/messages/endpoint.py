"""Where the ranks of a group reach one another for messages, without waiting for one another.

A rank publishes in the store where it is reached: within the host an abstract Unix socket, and once
it has seen that the group spans hosts a TCP port as well. Within the host the kernel tells the ends
whose process the other is; over TCP they show one another that they know the secret that was
published with the address, and that of the job.

Nothing here knows messages.
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

__all__ = ["Endpoint", "Guest", "place_of_this_process"]

_SECRET_BYTES = 16
_CLAIM = struct.Struct("<IQ")  # rank, address of the probe


def place_of_this_process() -> str:
    """Return what is equal for processes that reach one another's Unix sockets, "" if unknown."""
    place = join.place_of_this_process()
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
        # A forked child would keep on listening after this process has ended.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(reference))
        self._card = _Card(place_of_this_process(), socket.gethostname(), name, secret.hex())
        store.set(_key(rank), json.dumps(vars(self._card)))

    def use_store_beside_others(self) -> None:
        """Use a connection of its own: another thread may wait in that of the group."""
        with suppress(AttributeError, NotImplementedError, RuntimeError):  # older than 2.6
            self._store = self._store.clone()

    @property
    def descriptors(self) -> tuple[int, int]:
        """What is readable when there is something to ``welcome``, or in ``answers``."""
        return self._gate.fileno(), self._calls.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether somebody has connected who has not said who it is."""
        return self._gate.has_pending

    @property
    def is_calling(self) -> bool:
        """Whether a rank has not answered to whom this one connects."""
        return bool(self._calls)

    def _is_near(self, card: _Card) -> bool:
        return bool(card.place) and card.place == self._card.place

    def settle(self) -> None:
        """Look who has joined; once all have, listen where other hosts reach this one."""
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
        """Return the address at which other hosts reach this one."""
        address = tcp_connect.own_address(self._network, hosts, os.environ.get("MASTER_ADDR"))
        if address is None and not self._network:
            # On the host of MASTER_ADDR itself, that name may resolve to the loopback address.
            others = sorted(hosts - {self._card.host})
            address = next(filter(None, map(tcp_connect.address_towards, others)), None)
        return address

    def _card_of(self, rank: int) -> _Card | None:
        if rank not in self._cards and (value := self._look_up(_key(rank))) is not None:
            self._cards[rank] = _Card(**value)
        return self._cards.get(rank)

    def connect(self, rank: int, probe: int) -> tuple[socket.socket, bytes] | None:
        """Return a connection to a rank of this host, and what must be sent first.

        None if the rank is not known yet, has no room at the moment, or is on another host: once it
        has answered, it is in ``answers``.

        Args:
            rank: of the other process.
            probe: address of a number in the memory of this one.

        Raises:
            OSError: the rank cannot be reached.
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
            raise OSError(f"rank {rank} has no address that other hosts reach")
        secret = joined(bytes.fromhex(card.secret), job_secret(os.environ))
        self._calls.begin(rank, tuple(address), secret, claim)
        return None

    def answers(self) -> list[tuple[int, socket.socket | None]]:
        """Return the ranks of other hosts that have answered, each with a connection or None."""
        answered = self._calls.serve()
        for _, connection in answered:
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return answered

    def welcome(self) -> list[Guest]:
        """Return those who have said who they are; turn away those who do not."""
        guests = []
        with suppress(OSError):  # no descriptor is left
            for each in self._gate.serve():
                rank, probe = _CLAIM.unpack(each.claim)
                if rank >= self._size or rank == self._rank:
                    each.connection.close()
                    continue
                if not each.pid:
                    each.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                guests.append(Guest(rank, each.connection, each.pid, probe))
        return guests

    def close(self, farewell: bytes = b"") -> None:
        """Stop to listen; once more does nothing.

        Args:
            farewell: for those of this host who have connected and were not welcomed.
        """
        if farewell:
            self._gate.send_to_local_pending(farewell)
        self._gate.close()
        self._calls.close()

    def _look_up(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:  # the process that holds the store has ended
            return None


def _neighbour(card: _Card) -> socket.socket | None:
    """Return a connection to a rank of this host.

    None while strangers have taken all room that it has: every user may connect to it, and it turns
    them away when it listens. To wait for it here would be to wait for what they do.

    Raises:
        OSError: it has ended; another user may have its name now.
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
