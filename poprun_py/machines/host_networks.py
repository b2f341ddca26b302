"""The network for the traffic between the hosts, and this machine's address in this network."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from poprun_py.errors import StartError, UsageError
from poprun_py.machines import probe_script
from poprun_py.machines.host_list import Host
from poprun_py.options.launch_config import LaunchConfig

Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network
_INTERFACE_NAME = re.compile(r"[^\s/,]{1,15}")
_THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class Interface:
    """An IP address of a host, with its network interface and the number of bits in its netmask."""

    name: str
    address: str
    bits: int
    is_bridge: bool = False

    @property
    def subnet(self) -> Subnet:
        """The IP network that contains this IP address."""
        return ipaddress.ip_network(f"{self.address}/{self.bits}", strict=False)

    @property
    def carries_traffic(self) -> bool:
        """Whether other hosts may be reachable through the network interface.

        Loopback interfaces and bridges of containers do not lead to other hosts.
        """
        return not self.is_bridge and not ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True)
class Network:
    """The network chosen for traffic between the hosts, and each host's address on this network.

    ``name`` is the interface name or CIDR of the network. If no network is chosen, ``name`` is
    empty, and MPI chooses a network. ``interface`` is the name of the network interface; empty if
    the hosts have different names for the interface. ``includes_us`` tells whether this machine is
    on the network. ``own_address`` is this machine's address on the network; empty if unknown.
    """

    name: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    includes_us: bool = True
    own_address: str = ""

    @property
    def mpi_name(self) -> str:
        """The network's name for MPI, which does not accept an IPv6 network in CIDR notation.

        If the name is empty, MPI chooses the network.
        """
        return self.interface if ":" in self.name else self.name


def parse_subnet(text: str, option: str = "--host-subnet") -> Subnet | str:
    """Parse the network or the interface name in ``text``, the value of ``option``.

    Raises:
        UsageError: The text is neither a network in CIDR notation nor the name of an interface.
    """
    said = ""
    if "/" in text:
        try:
            return ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            said = f"{error}; "
    elif _INTERFACE_NAME.fullmatch(text):
        return text
    raise UsageError(
        f"{option} {text!r}: {said}expected an interface name such as eth0, or a network in CIDR "
        "notation such as 10.1.0.0/16 or fd00:1::/64"
    )


def shared_network(
    interfaces: Mapping[str, Sequence[Interface]], resolved: Collection[str] = ()
) -> Network:
    """Return a network that all hosts share, or ``Network()`` if the hosts share no network.

    ``interfaces`` has the network addresses of each host. ``resolved`` has the addresses that the
    resolver knows for the host names. IPv4 networks are preferred to IPv6 networks. Among networks
    of one IP version, the network with the most ``resolved`` addresses is chosen.
    """
    networks: dict[Subnet, list[tuple[str, Interface]]] = {}
    for host, own in interfaces.items():
        for interface in own:
            if interface.carries_traffic:
                networks.setdefault(interface.subnet, []).append((host, interface))
    shared = {
        network: members
        for network, members in networks.items()
        if {host for host, _ in members} == {*interfaces}
        # If two hosts have the same address on a network, the hosts do not share the network: each
        # host has a private network of its own, such as Docker's.
        and len({interface.address for _, interface in members}) == len(members)
    }
    if not shared:
        return Network()

    def preference(network: Subnet) -> tuple[int, int]:
        return -network.version, sum(i.address in resolved for _, i in shared[network])

    best = max(shared, key=preference)
    # If a host has several addresses on the chosen network, the first address is used.
    return _make_network(str(best), dict(reversed(shared[best])))


def wanted_network(
    interfaces: Mapping[str, Sequence[Interface]], wanted: str, option: str = "--host-subnet"
) -> Network:
    """Return the network ``wanted``, an interface name or a CIDR that the user gave for ``option``.

    Raises:
        UsageError: ``wanted`` is neither an interface name nor a CIDR.
        StartError: A host is not on the wanted network.
    """
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
                f"host {host} has no network {wanted}, which {option} names; the networks of the "
                f"host are: {usable or 'none'}"
            )
        members[host] = min(matching, key=lambda i: i.subnet.version)
    return _make_network(wanted, members)


def _make_network(name: str, members: Mapping[str, Interface]) -> Network:
    interfaces = {each.name for each in members.values()}
    return Network(
        name,
        {host: each.address for host, each in members.items()},
        interfaces.pop() if len(interfaces) == 1 else "",
    )


# --- the network of a launch --------------------------------------------------------------------


def own_interfaces() -> tuple[Interface, ...]:
    """Return this machine's network addresses."""
    return tuple(Interface(*entry) for entry in probe_script.networks())


def network_of_hosts(
    config: LaunchConfig, hosts: Sequence[Host], reported: Mapping[str, Sequence[Interface]]
) -> Network:
    """Choose the network for traffic between the hosts, if possible a network with this machine.

    ``reported`` has the network addresses that the probed hosts reported.

    Raises:
        UsageError: ``--host-subnet`` is neither an interface name nor a CIDR.
        StartError: A host is not on the network of ``--host-subnet``.
    """
    wanted, option = config.host_subnet, config.named("host_subnet")
    ours = own_interfaces()
    theirs = {h.name: ours if h.is_local else reported[h.name]
              for h in hosts if h.is_local or h.name in reported}  # fmt: skip
    if len(theirs) < len(hosts):
        if wanted is not None:
            # Hosts with unknown addresses are not checked: they may be on the wanted network.
            wanted_network(theirs, wanted, option)
        return Network(wanted or "")
    own_name = next((host.name for host in hosts if host.is_local), _THIS_MACHINE)
    with_us = {**theirs, own_name: ours}
    if wanted is not None:
        network = wanted_network(theirs, wanted, option)
        with contextlib.suppress(StartError):
            network = wanted_network(with_us, wanted, option)
    else:
        resolved = {_resolve(name) for name in theirs}
        network = shared_network(with_us, resolved)
        if not network.name:
            network = shared_network(theirs, resolved)
    own_address = network.addresses.get(own_name, "")
    return replace(network, includes_us=bool(own_address), own_address=own_address)


def _resolve(name: str) -> str:
    """Return the address of a host name, preferably IPv4; empty if the name cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    by_family = sorted(addresses, key=lambda each: each[0] != socket.AF_INET)
    return str(by_family[0][4][0])


def listen_address(others: Sequence[Host], network: str) -> str:
    """Return the address at which this machine listens for connections from the hosts ``others``.

    If this machine is not on ``network``, return its address on the route to the first host.

    Raises:
        StartError: This machine has no route to the first remote host.
    """
    if network:
        with contextlib.suppress(StartError, UsageError):
            return wanted_network({"": own_interfaces()}, network).addresses[""]
    name = others[0].name
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            # Connecting a datagram socket sends no packet, but makes the kernel choose the route to
            # the host.
            unsent.connect(address)
            return str(unsent.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"host {name} cannot be reached ({reason}); check the host name, or choose the network "
            "with --host-subnet"
        ) from None
