"""Hosts that were given by an IPv6 address have names for mpirun."""

from __future__ import annotations

import socket

import pytest

from poprun_py.errors import UsageError
from poprun_py.machines.allocation import with_names
from poprun_py.machines.host_list import Host


@pytest.fixture(autouse=True)
def resolver(monkeypatch):
    """Knows one address only."""

    def look_up(address, flags):
        assert flags == socket.NI_NAMEREQD
        if address != ("2001:db8::2", 0):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "node2", "0"

    monkeypatch.setattr(socket, "getnameinfo", look_up)


def test_addresses_get_the_names_that_they_have_here():
    hosts = with_names(
        [
            Host(name="2001:db8::1", slots=2, is_local=True),
            Host(name="2001:db8::2"),
            Host(name="node3"),
        ]
    )
    assert hosts == (
        Host(name=socket.gethostname(), slots=2, is_local=True),
        Host(name="node2"),
        Host(name="node3"),
    )


def test_an_address_without_a_name():
    with pytest.raises(UsageError) as caught:
        with_names([Host(name="2001:db8::9")])
    assert "host 2001:db8::9 has no name here" in str(caught.value)
    assert "'2001:db8::9 node1' to /etc/hosts" in str(caught.value)


def test_an_address_whose_name_is_given_too():
    with pytest.raises(UsageError, match="host 2001:db8::2 is node2, which is named already"):
        with_names([Host(name="Node2"), Host(name="2001:db8::2")])
