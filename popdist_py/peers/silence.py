"""Detection of a host that no longer answers, from the TCP state in this host's kernel.

A host with a slow program still answers, because its kernel acknowledges packets. This module does
not use the kernel's own limits, which are TCP_USER_TIMEOUT and the number of keep-alive probes.
These limits start again with each packet that is sent, and they also end connections to programs
that read slowly.
"""

from __future__ import annotations

import socket
import sys

# Offsets in Linux's struct tcp_info. Retransmissions and probes are counted since the last answer.
# The last field is the number of milliseconds since the last answer.
_SIZE, _RETRANSMITS, _PROBES, _LAST_ANSWER = 60, 2, 3, slice(56, 60)
# After a single retransmission or probe, the answer may still be on its way.
_MANY_RETRANSMITS, _MANY_PROBES = 3, 2


def is_silent(connection: socket.socket, seconds: float) -> bool:
    """Return whether the other host has not answered repeated packets for ``seconds``.

    An idle connection needs SO_KEEPALIVE, with an interval that is shorter than ``seconds``.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    is_asking = info[_RETRANSMITS] >= _MANY_RETRANSMITS or info[_PROBES] >= _MANY_PROBES
    milliseconds = int.from_bytes(info[_LAST_ANSWER], sys.byteorder)
    return is_asking and milliseconds >= 1000 * seconds
