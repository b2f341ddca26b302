"""Names for hosts that were given by an IPv6 address: no mpirun takes such an address.

Asks the resolver; nothing is sent to the hosts themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from poprun_py.errors import UsageError
from poprun_py.machines.host_list import Host


def with_names(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return ``hosts``, each IPv6 address replaced by the name that it has here.

    Raises:
        UsageError: an address has no name, or two hosts have the same.
    """
    named: list[Host] = []
    for host in hosts:
        name = _name_of(host) if ":" in host.name else host.name
        if any(name.lower() == each.name.lower() for each in named):
            raise UsageError(f"host {host.name} is {name}, which is named already; name it once")
        named.append(replace(host, name=name))
    return tuple(named)


def _name_of(host: Host) -> str:
    if host.is_local:
        return socket.gethostname()
    try:
        return socket.getnameinfo((host.name, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        raise UsageError(
            f"host {host.name} has no name here, and mpirun takes no IPv6 address; add a line such "
            f"as '{host.name} node1' to /etc/hosts, or give a name that leads there"
        ) from None
