"""Detection of a host that no longer answers, from the TCP state in this host's kernel.

A host with a slow program still answers, because its kernel acknowledges packets. This module does
not use the kernel's own limits, which are TCP_USER_TIMEOUT and the number of keep-alive probes.
These limits start again with each packet that is sent, and they also end connections to programs
that read slowly.
"""

from __future__ import annotations

import errno
import socket
import sys

# The instances of a job report a silent host after this time. The launcher notices a lost host
# after 15 s and reports more details, so its report must come first.
SILENT_SECONDS = 20
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // 4),
)
# When the other host is silent for too long, the kernel ends the connection with one of these
# errors. The error is the last one that the network reported, or else ETIMEDOUT.
_SILENCE_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

# The offsets of three fields in Linux's struct tcp_info: the number of retransmissions and the
# number of probes since the last answer, and the number of milliseconds since the last answer.
_SIZE, _RETRANSMITS, _PROBES, _LAST_ANSWER = 60, 2, 3, slice(56, 60)
# After a single retransmission or probe, the answer may still be on its way.
_MANY_RETRANSMITS, _MANY_PROBES = 3, 2


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel ask the other host regularly, so that ``is_silent`` also works when idle."""
    for option in _KEEP_ALIVE:
        connection.setsockopt(*option)


def is_silence(error: OSError) -> bool:
    """Return whether a connection failed because the other host does not answer."""
    return error.errno in _SILENCE_ERRORS


def is_silent(connection: socket.socket, seconds: float = SILENT_SECONDS) -> bool:
    """Return whether the other host has not answered repeated packets for ``seconds``.

    An idle connection needs ``keep_alive``, or SO_KEEPALIVE with an interval that is shorter than
    ``seconds``.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    is_asking = info[_RETRANSMITS] >= _MANY_RETRANSMITS or info[_PROBES] >= _MANY_PROBES
    milliseconds = int.from_bytes(info[_LAST_ANSWER], sys.byteorder)
    return is_asking and milliseconds >= 1000 * seconds
