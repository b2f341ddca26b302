"""TCP connections between the instances of several hosts, over the network that the launcher chose.

Every rank listens on one address until all connections are made, and then stops listening. When a
connection opens, both ends prove that they know a secret, which the ranks have exchanged through
their Meeting.

This module does not send or receive arrays.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import select
import socket
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from popdist_py.collectives.between_hosts.tcp import TcpMesh
from popdist_py.environment import job_secret
from popdist_py.peers.calls import Calls
from popdist_py.peers.gate import Gate
from popdist_py.peers.greeting import joined

if TYPE_CHECKING:
    from popdist_py.collectives.interfaces import Meeting

__all__ = ["address_towards", "connect", "family_of", "listen_at", "own_address"]

_TIMEOUT_SECONDS = 10.0
_SECRET_BYTES = 16
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_VALUES, _SUMS = b"v", b"s"
# The longest time, in seconds, to wait for events before failed attempts to connect are repeated.
_RETRY_CHECK_SECONDS = 0.05
# A rank that opens a connection first sends two facts, together named the claim: the kind of the
# connection, and its own rank.
_RANK_BYTES = 4
_CLAIM_BYTES = 1 + _RANK_BYTES


def connect(meeting: Meeting, network: str | None, towards: str | None = None) -> TcpMesh | None:
    """Connect all ranks of ``meeting``, which must all call this function.

    Args:
        meeting: One instance of each host.
        network: Interface or CIDR of the network between the hosts; None if it is not known.
        towards: The name of a host that is reached through the network between the hosts. If
            ``towards`` is None, the address to which this host's name resolves is used.

    Returns:
        The mesh; None if a rank cannot reach another rank.
    """
    address = own_address(network, set(meeting.all_gather(socket.gethostname())), towards)
    known = next(filter(None, meeting.all_gather(address)), None)
    if address is None and known is not None and not network:
        address = address_towards(known)
    listener = _listen(address)
    addresses = meeting.all_gather(listener.getsockname()[:2] if listener is not None else None)
    own_secret = secrets.token_hex(_SECRET_BYTES)
    secret = joined(bytes.fromhex(meeting.broadcast(own_secret)), job_secret(os.environ))
    connections: dict[tuple[bytes, int], socket.socket] = {}
    try:
        if listener is not None and None not in addresses:
            _connect_pairs(meeting.rank, addresses, listener, secret, connections)
    except OSError:
        pass  # the all_gather below tells all ranks that this rank lacks a connection
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
    """Return the address at which other hosts reach this host, preferably IPv4; None if unknown."""
    if network:
        return _address_in(network)
    if towards and (address := address_towards(towards)):
        return address
    if len(host_names) == 1:
        return "127.0.0.1"
    return next(filter(_is_reached, _addresses_of(socket.gethostname())), None)


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a host name, IPv4 first; an empty list for an unknown name."""
    found = []
    for family in _FAMILIES:
        with suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
            found += [str(entry[4][0]) for entry in entries]
    return found


def _is_reached(address: str) -> bool:
    """Return False for loopback and link-local IPv6 addresses, which other hosts cannot reach."""
    value = ipaddress.ip_address(address.partition("%")[0])
    return not value.is_loopback and not (value.version == 6 and value.is_link_local)


def address_towards(host: str) -> str | None:
    """Return the own address from which this host reaches ``host``; None if it is loopback."""
    for theirs in _addresses_of(host):
        with suppress(OSError), socket.socket(family_of(theirs), socket.SOCK_DGRAM) as probe:
            probe.connect((theirs, 9))  # sends nothing
            address: str = probe.getsockname()[0]
            if _is_reached(address):
                return address
    return None


def _address_in(network: str) -> str | None:
    import psutil

    is_subnet = "/" in network
    subnet = ipaddress.ip_network(network, strict=False) if is_subnet else None
    own = psutil.net_if_addrs()
    for family in _FAMILIES:
        for name, addresses in own.items():
            for entry in addresses:
                if entry.family != family or (family == socket.AF_INET6 and "%" in entry.address):
                    continue
                in_subnet = subnet is not None and ipaddress.ip_address(entry.address) in subnet
                if in_subnet or name == network:
                    return str(entry.address)
    return None


def family_of(address: str) -> socket.AddressFamily:
    """Return the socket family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(address: str | None) -> socket.socket | None:
    if address is None:
        return None
    with suppress(OSError):
        return listen_at(address)
    return None


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at an address of this host, on a free port.

    Raises:
        OSError: The address does not belong to this host.
    """
    return socket.create_server((address, 0), family=family_of(address), backlog=socket.SOMAXCONN)


def _connect_pairs(
    rank: int,
    addresses: list[tuple[str, int]],
    listener: socket.socket,
    secret: bytes,
    connections: dict[tuple[bytes, int], socket.socket],
) -> None:
    """Connect to lower ranks, and accept connections from higher ranks.

    The sockets are added to ``connections``.

    Raises:
        OSError: A rank cannot be reached.
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
            poll.poll(_RETRY_CHECK_SECONDS * 1000)
            for called, connection in calls.serve():
                if connection is None:
                    raise ConnectionRefusedError
                connections[called] = connection
            for caller in gate.serve():
                kind, other = caller.claim[:-_RANK_BYTES], int.from_bytes(caller.claim[1:], "big")
                is_expected = kind in (_VALUES, _SUMS) and rank < other < len(addresses)
                if is_expected and (kind, other) not in connections:
                    connections[kind, other] = caller.connection
                else:
                    caller.connection.close()
