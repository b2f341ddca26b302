"""Detection of another host that no longer answers, by the TCP state in this host's kernel.

A host with a slow program still answers, because its kernel acknowledges packets. This module does
not use the kernel's own limits, which are TCP_USER_TIMEOUT and the number of keep-alive probes. The
kernel's limits start again with each packet that is sent. The limits also end connections to
programs that read slowly.
"""

from __future__ import annotations

import errno
import socket
import sys

# The instances of a job report a host that has not answered for this number of seconds. The
# launcher reports a silent host after 15 s. The launcher's report must come first, because it
# contains more details.
SILENT_SECONDS = 20
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // 4),
)
# When the other host is silent for too long, the kernel ends the connection with one of these
# errors. The kernel uses the last error that the network reported, or ETIMEDOUT if there was none.
_SILENCE_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

# The number of bytes to read of Linux's struct tcp_info, and the offsets of three of its fields.
# These fields are the retransmissions and the probes since the last answer, and the milliseconds
# since the last answer.
_SIZE, _RETRANSMITS, _PROBES, _LAST_ANSWER = 60, 2, 3, slice(56, 60)
# The numbers of retransmissions and probes that show silence. After a single retransmission or
# probe, the answer may still be on its way.
_MANY_RETRANSMITS, _MANY_PROBES = 3, 2


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel probe an idle connection, so that ``is_silent`` works without traffic."""
    for option in _KEEP_ALIVE:
        connection.setsockopt(*option)


def is_silence(error: OSError) -> bool:
    """Return whether a connection failed because the other host does not answer."""
    return error.errno in _SILENCE_ERRORS


def is_silent(connection: socket.socket, seconds: float = SILENT_SECONDS) -> bool:
    """Return whether the other host has not answered repeated packets for ``seconds``.

    For an idle connection, the caller must first call ``keep_alive``, or set SO_KEEPALIVE with an
    interval shorter than ``seconds``.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    is_asking = info[_RETRANSMITS] >= _MANY_RETRANSMITS or info[_PROBES] >= _MANY_PROBES
    milliseconds = int.from_bytes(info[_LAST_ANSWER], sys.byteorder)
    return is_asking and milliseconds >= 1000 * seconds
