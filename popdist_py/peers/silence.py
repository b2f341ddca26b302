"""Whether the host at the other end of a connection still answers, as this host's kernel tells.

A program that is late has a host that answers. The kernel's own limits (TCP_USER_TIMEOUT, the count
of keep-alives) begin anew with each packet that is sent, and end connections to programs that are
late to read. Nothing here closes a connection.
"""

from __future__ import annotations

import socket
import sys

__all__ = ["is_silent"]

# struct tcp_info of Linux: packets that were sent again and probes, each in a row without an
# answer, and the milliseconds since the last answer.
_SIZE, _RETRANSMITS, _PROBES, _LAST_ANSWER = 60, 2, 3, slice(56, 60)
# The answer to a single one may just be on its way.
_MANY_RETRANSMITS, _MANY_PROBES = 3, 2


def is_silent(connection: socket.socket, seconds: float) -> bool:
    """Return whether nothing was answered for ``seconds`` although something should have been.

    A connection on which nothing is sent needs SO_KEEPALIVE, with a shorter time than ``seconds``.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    is_asking = info[_RETRANSMITS] >= _MANY_RETRANSMITS or info[_PROBES] >= _MANY_PROBES
    milliseconds = int.from_bytes(info[_LAST_ANSWER], sys.byteorder)
    return is_asking and milliseconds >= 1000 * seconds
