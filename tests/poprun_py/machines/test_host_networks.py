"""The network for the traffic between hosts is chosen from the addresses that they report."""

from __future__ import annotations

import pytest

from poprun_py.errors import StartError, UsageError
from poprun_py.machines.host_networks import Interface, parse_subnet, shared_network, wanted_network

LOOPBACK = Interface("lo", "127.0.0.1", 8)
DOCKER = Interface("docker0", "172.17.0.1", 16, True)


def host(*more):
    return [LOOPBACK, DOCKER, *more]


FAST = {
    "a": host(Interface("eno1", "10.0.0.1", 24), Interface("ib0", "192.168.7.1", 16)),
    "b": host(Interface("eth7", "10.0.0.2", 24), Interface("ib1", "192.168.7.2", 16)),
}


def test_the_network_of_the_hosts_names_is_preferred():
    chosen = shared_network(FAST, {"192.168.7.1", "192.168.7.2"})
    assert chosen.name == "192.168.0.0/16"
    assert chosen.addresses == {"a": "192.168.7.1", "b": "192.168.7.2"}


def test_otherwise_the_first_shared_network_is_chosen():
    assert shared_network(FAST).name == "10.0.0.0/24"
    # Debian resolves a machine's own name to a loopback address.
    assert shared_network(FAST, {"127.0.1.1"}).name == "10.0.0.0/24"


def test_loopback_and_bridges_are_never_chosen():
    assert shared_network({"a": host(), "b": host()}).name == ""


def test_a_private_network_with_equal_addresses_is_not_shared():
    private = Interface("virbr1", "10.88.0.1", 16)
    hosts = {
        "a": host(private, Interface("eth0", "10.0.0.1", 24)),
        "b": host(private, Interface("eth0", "10.0.0.2", 24)),
    }
    assert shared_network(hosts).name == "10.0.0.0/24"


def test_mpi_chooses_if_the_hosts_share_no_network():
    hosts = {"a": host(Interface("e", "10.0.1.1", 24)), "b": host(Interface("e", "10.0.2.1", 24))}
    assert shared_network(hosts).name == ""


IPV6 = {
    "a": host(Interface("eth0", "fd00:1::1", 64)),
    "b": host(Interface("eth0", "fd00:1::2", 64)),
}


def test_hosts_that_have_ipv6_only():
    chosen = shared_network(IPV6)
    assert (chosen.name, chosen.addresses["b"]) == ("fd00:1::/64", "fd00:1::2")
    # MPI accepts only one interface name for all hosts here, and no CIDR of IPv6.
    assert chosen.mpi_name == "eth0"
    other = shared_network({**IPV6, "b": host(Interface("eth7", "fd00:1::2", 64))})
    assert (other.name, other.mpi_name) == ("fd00:1::/64", "")


def test_ipv4_is_preferred_to_ipv6():
    both = {name: [*IPV6[name], FAST[name][2]] for name in IPV6}
    chosen = shared_network(both, {"fd00:1::1", "fd00:1::2"})
    assert chosen.name == chosen.mpi_name == "10.0.0.0/24"
    assert wanted_network(both, "fd00:1::/64").mpi_name == "eth0"
    assert wanted_network({"a": both["a"]}, "eth0").addresses == {"a": "fd00:1::1"}


@pytest.mark.parametrize("wanted", ["ib0", "192.168.0.0/16", "192.168.7.0/24"])
def test_a_wanted_network_is_passed_on_as_given(wanted):
    hosts = {"a": FAST["a"]}
    chosen = wanted_network(hosts, wanted)
    assert chosen.name == wanted
    assert chosen.addresses == {"a": "192.168.7.1"}


@pytest.mark.parametrize("wanted", ["ib9", "10.9.0.0/16"])
def test_an_error_names_the_host_that_is_not_on_the_wanted_network(wanted):
    with pytest.raises(StartError) as caught:
        wanted_network(FAST, wanted)
    assert "host a has no network" in str(caught.value)
    assert "eno1 (10.0.0.0/24)" in str(caught.value)


@pytest.mark.parametrize("text", ["10.0.0.0/99", "x/y", "a b", "", "eth0,eth1", "a" * 16])
def test_an_invalid_network_is_rejected(text):
    with pytest.raises(UsageError, match="--host-subnet"):
        parse_subnet(text)
