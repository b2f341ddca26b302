"""Connecting the instances of several hosts by TCP, over the network that the launcher chose.

Every rank listens on one address until all connections are made; only the connections stay open.
Both ends of each show that they know a secret, which the meeting carried.

Nothing here sends or receives arrays.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import select
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING

from popdist_py.collectives.between_hosts.tcp import TcpMesh
from popdist_py.environment import job_secret
from popdist_py.peers.calls import Calls
from popdist_py.peers.gate import Gate
from popdist_py.peers.greeting import joined

if TYPE_CHECKING:
    from popdist_py.collectives.meeting import Meeting

__all__ = ["connect", "own_address"]

_TIMEOUT_SECONDS = 10.0
_SECRET_BYTES = 16
_VALUES, _SUMS = b"v", b"s"
# How often to look whom to call again.
_LOOK_SECONDS = 0.05
# What a caller says of itself: the kind of the connection, and its rank.
_RANK_BYTES = 4
_CLAIM_BYTES = 1 + _RANK_BYTES


def connect(meeting: Meeting, network: str | None, towards: str | None = None) -> TcpMesh | None:
    """Connect all ranks of ``meeting``; collective. Return None if they do not reach one another.

    Args:
        meeting: one instance of each host.
        network: interface or CIDR that all hosts are on; None if it is not known.
        towards: a host to which this network leads; None: the network of the host's name.
    """
    address = own_address(network, set(meeting.all_gather(socket.gethostname())), towards)
    known = next(filter(None, meeting.all_gather(address)), None)
    if address is None and known is not None and not network:
        address = _address_towards(known)
    listener = _listen(address)
    addresses = meeting.all_gather(listener.getsockname() if listener is not None else None)
    own_secret = secrets.token_hex(_SECRET_BYTES)
    secret = joined(bytes.fromhex(meeting.broadcast(own_secret)), job_secret(os.environ))
    connections: dict[tuple[bytes, int], socket.socket] = {}
    try:
        if listener is not None and None not in addresses:
            _connect_pairs(meeting.rank, addresses, listener, secret, connections)
    except OSError:
        pass  # a rank that lacks a connection reports that below
    finally:
        if listener is not None:
            listener.close()
    complete = len(connections) == 2 * (meeting.size - 1)
    if all(meeting.all_gather(complete)):
        values, sums = (
            {rank: connections[kind, rank] for key, rank in sorted(connections) if key == kind}
            for kind in (_VALUES, _SUMS)
        )
        return TcpMesh(meeting.rank, values, sums)
    for connection in connections.values():
        connection.close()
    return None


def own_address(
    network: str | None, host_names: set[str], towards: str | None = None
) -> str | None:
    """Return the IPv4 address at which the other hosts reach this one."""
    if network:
        return _address_in(network)
    if towards and (address := _address_towards(towards)):
        return address
    if len(host_names) == 1:
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    return None if ipaddress.IPv4Address(address).is_loopback else address


def _address_towards(host: str) -> str | None:
    """Return the address of the interface that leads to another host; None if it is loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if ipaddress.IPv4Address(address).is_loopback else address


def _address_in(network: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family != socket.AF_INET:
                continue
            if name == network or (
                "/" in network
                and ipaddress.IPv4Address(entry.address)
                in ipaddress.IPv4Network(network, strict=False)
            ):
                return str(entry.address)
    return None


def _listen(address: str | None) -> socket.socket | None:
    if address is None:
        return None
    try:
        return socket.create_server((address, 0), backlog=socket.SOMAXCONN)
    except OSError:
        return None


def _connect_pairs(
    rank: int,
    addresses: list[tuple[str, int]],
    listener: socket.socket,
    secret: bytes,
    connections: dict[tuple[bytes, int], socket.socket],
) -> None:
    """Connect to the ranks before this one, and accept those after it, into ``connections``.

    Raises:
        OSError: a rank cannot be reached.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    wanted = 2 * (len(addresses) - 1)
    gate = Gate(secret, _CLAIM_BYTES, wanted, logging.getLogger("popdist").warning)
    calls: Calls[tuple[bytes, int]] = Calls()
    with closing(gate), closing(calls):
        gate.listen(listener)
        for other in range(rank):
            host, port = addresses[other]
            for kind in (_VALUES, _SUMS):
                claim = kind + rank.to_bytes(_RANK_BYTES, "big")
                calls.begin((kind, other), (host, port), secret, claim)
        poll = select.poll()
        poll.register(gate, select.POLLIN)
        poll.register(calls, select.POLLIN)
        while len(connections) < wanted and time.monotonic() < deadline:
            poll.poll(_LOOK_SECONDS * 1000)
            for called, connection in calls.serve():
                if connection is None:
                    raise ConnectionRefusedError
                connections[called] = connection
            for guest in gate.serve():
                kind, other = guest.claim[:-_RANK_BYTES], int.from_bytes(guest.claim[1:], "big")
                is_expected = kind in (_VALUES, _SUMS) and rank < other < len(addresses)
                if is_expected and (kind, other) not in connections:
                    connections[kind, other] = guest.connection
                else:
                    guest.connection.close()
