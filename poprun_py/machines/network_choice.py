"""Which network carries the traffic between the hosts: chosen from the addresses that they report.

Pure: interfaces and addresses in, one network out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poprun_py.errors import StartError, UsageError

Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network
_INTERFACE_NAME = re.compile(r"[^\s/,]{1,15}")


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of a host: the interface, the address and the bits of its network's mask."""

    name: str
    address: str
    bits: int
    is_bridge: bool = False

    @property
    def subnet(self) -> Subnet:
        """The network that the address is in."""
        return ipaddress.ip_network(f"{self.address}/{self.bits}", strict=False)

    @property
    def carries_traffic(self) -> bool:
        """Tell whether other hosts may be behind it: no loopback, no bridge of containers."""
        return not self.is_bridge and not ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True)
class Network:
    """The chosen network (interface name or CIDR), and each host's address in it.

    ``name`` is empty where the hosts share no network: then MPI chooses. ``interface`` is what an
    IPv6 network is called on every host: MPI knows no CIDR of these. Empty where hosts differ.
    """

    name: str
    addresses: Mapping[str, str]
    interface: str = ""

    @property
    def mpi_name(self) -> str:
        """The network as MPI is told; empty where it has to choose."""
        return self.interface if ":" in self.name else self.name


def parse_subnet(text: str, option: str = "--host-subnet") -> Subnet | str:
    """Return the value of ``option``: a network, or the name of an interface.

    Raises:
        UsageError: it is neither.
    """
    if "/" in text:
        try:
            return ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise UsageError(
                f"{option} {text!r}: {error}; expected an interface name such as eth0, or a "
                "CIDR such as 10.1.0.0/16 or fd00:1::/64"
            ) from None
    if not _INTERFACE_NAME.fullmatch(text):
        raise UsageError(
            f"{option} {text!r}: expected an interface name such as eth0, or a CIDR such as "
            "10.1.0.0/16"
        )
    return text


def choose_network(
    interfaces: Mapping[str, Sequence[Interface]],
    *,
    wanted: str | None = None,
    option: str = "--host-subnet",
    resolved: Mapping[str, str] | None = None,
) -> Network:
    """Choose one network that every host is on.

    Without ``wanted`` it is the one that the hosts' own names lead to, else the first that all of
    them share; one of IPv6 only where they share none of IPv4.

    Args:
        interfaces: what every host reports.
        wanted: the network to use, by interface or CIDR.
        option: how messages name ``wanted``.
        resolved: the address behind each host's name, where known.

    Raises:
        UsageError: ``wanted`` is neither an interface name nor a CIDR.
        StartError: a host is not on the network that ``wanted`` names.
    """
    if wanted is not None:
        return _wanted(interfaces, wanted, option)
    usable = {h: [i for i in own if i.carries_traffic] for h, own in interfaces.items()}
    shared = _shared(usable)
    if not shared:
        return Network("", {})
    behind_names = set((resolved or {}).values())
    best = max(
        shared,
        key=lambda net: (
            -net.version,
            sum(
                i.address in behind_names for own in usable.values() for i in own if i.subnet == net
            ),
        ),
    )
    return _network_of(
        str(best), {h: next(i for i in own if i.subnet == best) for h, own in usable.items()}
    )


def _network_of(name: str, members: Mapping[str, Interface]) -> Network:
    """Return the network of one address of every host."""
    names = {each.name for each in members.values()}
    return Network(
        name,
        {host: each.address for host, each in members.items()},
        names.pop() if len(names) == 1 else "",
    )


def _shared(usable: Mapping[str, Sequence[Interface]]) -> list[Subnet]:
    """Return the networks that every host is on, with an address of its own, in a stable order."""
    everyone = list(usable.values())
    first = dict.fromkeys(i.subnet for i in (everyone[0] if everyone else ()))
    return [
        net
        for net in first
        if all(any(i.subnet == net for i in own) for own in everyone)
        # Equal addresses on several hosts: a private network of each, such as Docker's.
        and len({i.address for own in everyone for i in own if i.subnet == net})
        == sum(i.subnet == net for own in everyone for i in own)
    ]


def _wanted(interfaces: Mapping[str, Sequence[Interface]], wanted: str, option: str) -> Network:
    subnet = parse_subnet(wanted, option)
    members = {}
    for host, own in interfaces.items():
        matching = [
            i
            for i in own
            if i.name == subnet
            or (not isinstance(subnet, str) and ipaddress.ip_address(i.address) in subnet)
        ]
        if not matching:
            usable = ", ".join(f"{i.name} ({i.subnet})" for i in own if i.carries_traffic)
            raise StartError(
                f"host {host} is not on {option} {wanted}; it has {usable or 'no network'}"
            )
        members[host] = min(matching, key=lambda i: i.subnet.version)
    return _network_of(wanted, members)
