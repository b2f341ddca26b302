"""Connecting the instances of several hosts by TCP, over the network that the launcher chose.

Nothing stays open but the connections: who listens does so on one address until all have come, and
takes only those who know the secret that MPI carried.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from typing import TYPE_CHECKING

from popdist_py.collectives.between_hosts.tcp import Wire

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["connect"]

_LIMIT_SECONDS = 10.0
_SECRET_BYTES = 16
_VALUES, _SUMS = b"v", b"s"


def connect(comm: MPI.Comm, network: str | None) -> Wire | None:
    """Connect all ranks of ``comm``; collective. None if they do not reach one another.

    Args:
        comm: one instance of each host.
        network: interface or CIDR that all are on; None: the one of the host's name.
    """
    address = _own_address(network, set(comm.allgather(socket.gethostname())))
    listener = _listen(address)
    places = comm.allgather(listener.getsockname() if listener is not None else None)
    secret: bytes = comm.bcast(secrets.token_bytes(_SECRET_BYTES), root=0)
    found: dict[tuple[bytes, int], socket.socket] = {}
    try:
        if listener is not None and None not in places:
            _meet(comm.Get_rank(), places, listener, secret, found)
    except OSError:
        pass  # whoever misses a connection says so below
    finally:
        if listener is not None:
            listener.close()
    complete = len(found) == 2 * (comm.Get_size() - 1)
    if all(comm.allgather(complete)):
        values, sums = (
            {rank: found[which, rank] for which, rank in sorted(found) if which == kind}
            for kind in (_VALUES, _SUMS)
        )
        return Wire(comm.Get_rank(), values, sums)
    for connection in found.values():
        connection.close()
    return None


def _own_address(network: str | None, host_names: set[str]) -> str | None:
    """Return the IPv4 address at which the other hosts reach this one."""
    if network:
        return _address_in(network)
    if len(host_names) == 1:
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
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


def _meet(
    rank: int,
    places: list[tuple[str, int]],
    listener: socket.socket,
    secret: bytes,
    found: dict[tuple[bytes, int], socket.socket],
) -> None:
    """Go to the ranks before this one, and take in those after it; into ``found``."""
    end = time.monotonic() + _LIMIT_SECONDS
    for other in range(rank):
        for kind in (_VALUES, _SUMS):
            connection = socket.create_connection(places[other], _LIMIT_SECONDS)
            found[kind, other] = connection
            connection.sendall(secret + kind + rank.to_bytes(4, "big"))
    while len(found) < 2 * (len(places) - 1):
        listener.settimeout(max(end - time.monotonic(), 1e-3))
        connection = listener.accept()[0]
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        words = _read(connection, _SECRET_BYTES + 5)
        kind, other = words[_SECRET_BYTES:-4], int.from_bytes(words[-4:], "big")
        known = kind in (_VALUES, _SUMS) and rank < other < len(places)
        if hmac.compare_digest(words[:_SECRET_BYTES], secret) and known:
            found[kind, other] = connection
        else:
            connection.close()


def _read(connection: socket.socket, count: int) -> bytes:
    """Return ``count`` bytes, fewer if the other end closes."""
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data
