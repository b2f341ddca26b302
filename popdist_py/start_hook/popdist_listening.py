"""Moves listening sockets from all addresses of this machine to a single address.

MPI libraries listen on every address of the machine. No option of these libraries changes this. A
process uses popdist_listening for its own sockets, and popdist_lent_sockets for the sockets of
other processes. This module contains no code that is specific to MPI. A program that imports MPI
also imports this module, so this module imports no other module of the library.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOPBACK = "lo"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOPBACK_OF = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# A constant from <linux/sockios.h>, and the file that lists the IPv6 addresses of this network
# namespace.
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = "/proc/self/net/if_inet6"
# The format of tcp_info for a listening socket, with the number of connections that wait to be
# accepted and with the largest allowed number of such connections.
_TCP_INFO_BYTES, _TCP_INFO_QUEUE = 32, "=24xII"


def descriptors() -> set[int]:
    """Return the file descriptors of this process, or an empty set if /proc does not exist."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # os.listdir has already closed its own descriptor, which the list contains too.
            with contextlib.suppress(OSError):
                os.fstat(int(name))
                found.add(int(name))
    return found


def listens_everywhere(listener: socket.socket) -> bool:
    """Tell whether a socket accepts connections to any address of this machine."""
    try:
        return (
            listener.family in _FAMILIES
            and listener.type == socket.SOCK_STREAM
            and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and listener.getsockname()[0] in ("0.0.0.0", "::")
        )
    except OSError:
        return False


def address_in(network: str, family: int) -> "str | None":
    """Return this machine's address on a network.

    If all of this machine's addresses on the network are of the other family, return the loopback
    address of ``family``.

    Args:
        network: The name of an interface, such as ``lo``, or a CIDR.
        family: ``socket.AF_INET`` or ``socket.AF_INET6``.

    Returns:
        The address, or None if this machine does not have an address on the network.
    """
    if network == _LOOPBACK:
        return _LOOPBACK_OF[socket.AddressFamily(family)]
    found = {each: _address_in(network, each) for each in _FAMILIES}
    own = found[socket.AddressFamily(family)]
    return own or (_LOOPBACK_OF[socket.AddressFamily(family)] if any(found.values()) else None)


def _address_in(network: str, family: int) -> "str | None":
    prefix, slash, _ = network.partition("/")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        if not slash:
            return _address_of_interface(network, family, probe)
        import ipaddress

        subnet = ipaddress.ip_network(network, strict=False)
        if subnet.version == (4 if family == socket.AF_INET else 6):
            probe.connect(
                (str(subnet[1] if subnet.num_addresses > 1 else prefix), 9)
            )  # connecting a UDP socket does not send a packet
            address: str = probe.getsockname()[0]
            return address if ipaddress.ip_address(address) in subnet else None
    return None


def _address_of_interface(name: str, family: int, probe: socket.socket) -> "str | None":
    if family == socket.AF_INET:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with open(_IPV6_ADDRESSES, encoding="ascii") as lines:
        for line in lines:
            number, _, _, scope, _, interface = line.split()
            if (
                interface == name and scope == "00"
            ):  # other hosts cannot use a link-local address without a zone
                return socket.inet_ntop(family, bytes.fromhex(number))
    return None


@contextlib.contextmanager
def sharing_port(listener: socket.socket, address: str) -> "Iterator[socket.socket]":
    """Yield a new socket at ``address`` that has the same port as ``listener``."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as narrow:
        for each in (listener, narrow):
            # With SO_REUSEPORT and SO_REUSEADDR, the old socket, the new socket and all accepted
            # connections can use the same port. Sockets of other users still cannot use this port.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            narrow.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        narrow.bind((address, listener.getsockname()[1]))
        yield narrow


def queue(listener: socket.socket) -> "tuple[int, int]":
    """Return the number of connections that wait to be accepted, and the largest allowed number."""
    told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    waiting, most = struct.unpack(_TCP_INFO_QUEUE, told)
    return waiting, most


@contextlib.contextmanager
def borrowed(descriptor: int) -> "Iterator[socket.socket]":
    """Yield a socket object for a descriptor, and close the descriptor after the block.

    Raises:
        OSError: The descriptor is not a socket.
    """
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with found:
        yield found


# --- sockets of this process ------------------------------------------------------------------


def move_own(network: str, before: "set[int]") -> int:
    """Make this process's sockets listen on one address instead of on all addresses.

    The new address is this machine's address on ``network``. The port stays open during the whole
    move. A new socket with the same port gets the descriptor of the old socket, and replaces the
    old socket in each epoll of this process. A socket with connections that wait to be accepted is
    not moved. A connection that reaches the old socket during the move is reset.

    Args:
        network: The name of an interface, such as ``lo``, or a CIDR.
        before: The descriptors of sockets that must not be moved.

    Returns:
        The number of moved sockets.
    """
    moved = 0
    for descriptor in sorted(descriptors() - before):
        with contextlib.suppress(OSError), borrowed(os.dup(descriptor)) as listener:
            if listens_everywhere(listener):
                address = address_in(network, listener.family)
                moved += address is not None and _replace(descriptor, listener, address)
    return moved


def _replace(descriptor: int, listener: socket.socket, address: str) -> bool:
    waiting, most = queue(listener)
    if waiting:
        return False  # moving the socket would reset the waiting connections
    with sharing_port(listener, address) as narrow:
        narrow.listen(most)
        narrow.setblocking(os.get_blocking(descriptor))
        waits = [*_waits(descriptor)]
        os.dup2(narrow.fileno(), descriptor, inheritable=os.get_inheritable(descriptor))
        # Closing the last descriptor of the old socket also removes the socket from each epoll.
        listener.close()
        for epoll, events in waits:
            with select.epoll.fromfd(os.dup(epoll)) as waiter:
                waiter.register(descriptor, events)
    return True


def _waits(descriptor: int) -> "Iterator[tuple[int, int]]":
    """Yield each epoll of this process that monitors ``descriptor``, and the monitored events."""
    for number in descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as lines:
                for line in lines:
                    words = line.split()
                    if words[:2] == ["tfd:", str(descriptor)]:
                        yield number, int(words[words.index("events:") + 1], 16)
