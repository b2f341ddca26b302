"""How many bytes the TCP connections of processes have carried, which /proc does not show.

The kernel is asked through sock_diag(7), as ``ss`` does. Standard library only and cheap to import.
"""

import os
from sys import byteorder

from poprun_py.instance.quick_imports import socket

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAX_PROCESSES = 64
# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/tcp.h.
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_TCP_INFO = 2
_ESTABLISHED_AND_CLOSING = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
_HEADER_BYTES, _MESSAGE_BYTES, _INODE_AT = 16, 72, 68
# Offsets in tcp_info: of the acknowledged sent bytes, and of the received bytes.
_ACKED_AT, _RECEIVED_AT = 120, 128
_CHUNK, _SECONDS = 1 << 18, 0.2


class SocketBytes:
    """Adds up the bytes that the TCP connections of some processes carry from call to call."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._moved = 0

    def num_bytes(self, pids: "Iterable[int]") -> int:
        """Return the bytes carried by now in both directions; use only the difference of two calls.

        If a connection ends between two calls, not all its bytes are counted.
        """
        inodes = {inode for pid in list(pids)[:_MAX_PROCESSES] for inode in _socket_inodes(pid)}
        if not inodes:
            return self._moved
        counts = {inode: count for inode, count in _tcp_bytes() if inode in inodes}
        self._moved += sum(max(0, n - self._seen.get(inode, 0)) for inode, n in counts.items())
        self._seen = counts
        return self._moved


def _socket_inodes(pid: int) -> "list[int]":
    """Return the inodes of the sockets that a process has open."""
    inodes = []
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return []
    for descriptor in descriptors:
        try:
            target = os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.append(int(target[8:-1]))
    return inodes


def _tcp_bytes() -> "Iterator[tuple[int, int]]":
    """Yield inode and bytes of every TCP connection of this network namespace."""
    try:
        asked = socket.socket(16, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)  # AF_NETLINK
    except OSError:
        return
    try:
        # A send never blocks here, but the wrapper must not wait for a kernel that does not answer.
        asked.settimeout(_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked.sendall(_request(family))
            yield from _answers(asked)
    except OSError:
        return
    finally:
        asked.close()


def _request(family: int) -> bytes:
    """Return the request for all TCP connections of a family that are established or closing."""
    body = bytes((family, socket.IPPROTO_TCP, 1 << _TCP_INFO - 1, 0))
    body += _number(_ESTABLISHED_AND_CLOSING, 4) + bytes(48)
    size = _HEADER_BYTES + len(body)
    return _number(size, 4) + _number(_BY_FAMILY, 2) + _number(_REQUEST_DUMP, 2) + bytes(8) + body


def _answers(asked: "socket.socket") -> "Iterator[tuple[int, int]]":
    """Yield inode and bytes of the connections in the kernel's answer."""
    while True:
        data = asked.recv(_CHUNK)
        at = 0
        while at + _HEADER_BYTES <= len(data):
            size, kind = _value(data, at, 4), _value(data, at + 4, 2)
            if kind in (_DONE, _ERROR) or size < _HEADER_BYTES:
                return
            message = data[at + _HEADER_BYTES : at + size]
            if (count := _bytes_of(message)) is not None:
                yield _value(message, _INODE_AT, 4), count
            at += size + 3 & ~3
        if not data:
            return


def _bytes_of(message: bytes) -> "int | None":
    """Return the bytes that a connection has carried; None if the message has no tcp_info."""
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        size, kind = _value(message, at, 2), _value(message, at + 2, 2)
        if kind == _TCP_INFO and size >= 4 + _RECEIVED_AT + 8:
            return _value(message, at + 4 + _ACKED_AT, 8) + _value(
                message, at + 4 + _RECEIVED_AT, 8
            )
        at += max(4, size + 3 & ~3)
    return None


def _number(value: int, size: int) -> bytes:
    return value.to_bytes(size, byteorder)


def _value(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], byteorder)
