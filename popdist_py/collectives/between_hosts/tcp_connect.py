"""Connecting the instances of several hosts by TCP, over the network that the launcher chose.

Every rank listens on one address until all connections are made; only the connections stay open.
A rank accepts only peers that send the secret of the job, which the meeting carried.

Nothing here sends or receives arrays.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from typing import TYPE_CHECKING

from popdist_py.collectives.between_hosts.tcp import TcpMesh

if TYPE_CHECKING:
    from popdist_py.collectives.meeting import Meeting

__all__ = ["connect", "own_address"]

_TIMEOUT_SECONDS = 10.0
_SECRET_BYTES = 16
_VALUES, _SUMS = b"v", b"s"


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
    secret = bytes.fromhex(meeting.broadcast(secrets.token_hex(_SECRET_BYTES)))
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
    """Connect to the ranks before this one, and accept those after it, into ``connections``."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    for other in range(rank):
        for kind in (_VALUES, _SUMS):
            host, port = addresses[other]
            connection = socket.create_connection((host, port), _TIMEOUT_SECONDS)
            connections[kind, other] = connection
            connection.sendall(secret + kind + rank.to_bytes(4, "big"))
    while len(connections) < 2 * (len(addresses) - 1):
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection = listener.accept()[0]
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        greeting = _receive(connection, _SECRET_BYTES + 5)
        kind, other = greeting[_SECRET_BYTES:-4], int.from_bytes(greeting[-4:], "big")
        is_expected = kind in (_VALUES, _SUMS) and rank < other < len(addresses)
        if hmac.compare_digest(greeting[:_SECRET_BYTES], secret) and is_expected:
            connections[kind, other] = connection
        else:
            connection.close()


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes, fewer if the other end closes."""
    received = b""
    while len(received) < count and (chunk := connection.recv(count - len(received))):
        received += chunk
    return received
