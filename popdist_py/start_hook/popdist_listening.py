"""Sockets of MPI that listen on every address of this machine, and how they get a single one.

No MPI has an option for it. Here a process moves its own; those of other processes are moved by
popdist_lent_sockets.py. Nothing here knows which sockets are MPI's. Imported when a
program imports MPI, so it imports nothing of the library.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOPBACK = "lo"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOPBACK_OF = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# <linux/sockios.h>, and where the kernel tells the IPv6 addresses of this network namespace.
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = "/proc/self/net/if_inet6"
# tcp_info of a socket that listens: connections that wait to be accepted, and how many may.
_TCP_INFO_BYTES, _TCP_INFO_QUEUE = 32, "=24xII"


def descriptors() -> set[int]:
    """Return the descriptors of this process; none where the kernel does not tell them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # The one by which they are listed is gone.
            with contextlib.suppress(OSError):
                os.fstat(int(name))
                found.add(int(name))
    return found


def listens_everywhere(listener: socket.socket) -> bool:
    """Whether a socket accepts connections that come to any address of this machine."""
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
    """Return this machine's address on a network; loopback for a family that has none there.

    Args:
        network: an interface, ``lo`` among them, or a CIDR.
        family: ``socket.AF_INET`` or ``socket.AF_INET6``.

    Returns:
        None where this machine is not on the network at all.
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
            probe.connect((str(subnet[1] if subnet.num_addresses > 1 else prefix), 9))  # sends none
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
            if interface == name and scope == "00":  # global: others need the interface too
                return socket.inet_ntop(family, bytes.fromhex(number))
    return None


@contextlib.contextmanager
def sharing_port(listener: socket.socket, address: str) -> "Iterator[socket.socket]":
    """A socket at an address, with the port of one that listens everywhere."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as narrow:
        for each in (listener, narrow):
            # Both have the port for a moment; no other user's socket may. Connections that have
            # been accepted already have it as well.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            narrow.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        narrow.bind((address, listener.getsockname()[1]))
        yield narrow


def queue(listener: socket.socket) -> "tuple[int, int]":
    """Return how many connections wait to be accepted, and how many may."""
    told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    waiting, most = struct.unpack(_TCP_INFO_QUEUE, told)
    return waiting, most


@contextlib.contextmanager
def borrowed(descriptor: int) -> "Iterator[socket.socket]":
    """A socket of a descriptor that is closed afterwards; OSError if it is none."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with found:
        yield found


# --- sockets of this process ------------------------------------------------------------------


def move_own(network: str, before: "set[int]") -> int:
    """Move what this process listens on everywhere to its address on ``network``.

    There is no moment in which nobody listens: a second socket with the same port takes the
    descriptor over, and its place where the process waits for it (epoll). Where somebody waits to
    be accepted the socket stays; who is about to come there is cut off.

    Args:
        network: as for ``address_in``.
        before: descriptors to leave alone.

    Returns:
        How many were moved.
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
        return False  # whoever came already would be cut off
    with sharing_port(listener, address) as narrow:
        narrow.listen(most)
        narrow.setblocking(os.get_blocking(descriptor))
        waits = [*_waits(descriptor)]
        os.dup2(narrow.fileno(), descriptor, inheritable=os.get_inheritable(descriptor))
        listener.close()  # the last descriptor of the old one: its place with epoll goes with it
        for epoll, events in waits:
            with select.epoll.fromfd(os.dup(epoll)) as waiter:
                waiter.register(descriptor, events)
    return True


def _waits(descriptor: int) -> "Iterator[tuple[int, int]]":
    """Yield each epoll of this process that waits for a descriptor, and for which events."""
    for number in descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as lines:
                for line in lines:
                    words = line.split()
                    if words[:2] == ["tfd:", str(descriptor)]:
                        yield number, int(words[words.index("events:") + 1], 16)
