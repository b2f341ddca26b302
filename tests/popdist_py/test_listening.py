"""Sockets that listen on every address, and how they are moved to one."""

from __future__ import annotations

import contextlib
import os
import select
import socket

import pytest
from support.listening import free_port

from popdist_py.start_hook import popdist_listening as listening

EVERYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
FAMILIES = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])


def listener(family: socket.AddressFamily, address: str | None = None, port: int = 0):
    """Return a socket that listens."""
    made = socket.socket(family)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind((EVERYWHERE[family] if address is None else address, port))
    made.listen(77)
    return made


@FAMILIES
@pytest.mark.parametrize("is_given", [False, True], ids=["port of the kernel", "port given"])
def test_own_sockets_move_and_are_waited_for_as_before(family, is_given):
    before = listening.descriptors()
    with listener(family, port=free_port() if is_given else 0) as ours, select.epoll() as waiter:
        ours.setblocking(False)
        waiter.register(ours, select.EPOLLIN)
        port = ours.getsockname()[1]
        assert listening.move_own("lo", before) == 1
        assert ours.getsockname()[:2] == (listening.address_in("lo", family), port)
        assert not ours.getblocking()
        assert not os.get_inheritable(ours.fileno())
        assert waiter.poll(0) == []
        with socket.create_connection(ours.getsockname()[:2], 5):
            assert waiter.poll(5) == [(ours.fileno(), select.EPOLLIN)]
            ours.accept()[0].close()


@FAMILIES
def test_sockets_at_an_address_of_before_and_of_other_kinds_stay(family):
    with listener(family) as older:
        before = listening.descriptors()
        narrow = listener(family, listening.address_in("lo", family))
        datagrams = socket.socket(family, socket.SOCK_DGRAM)
        with narrow, datagrams, socket.socket(family) as silent:
            datagrams.bind((EVERYWHERE[family], 0))
            silent.bind((EVERYWHERE[family], 0))
            assert listening.move_own("lo", before) == 0
            assert listening.listens_everywhere(older)
            assert datagrams.getsockname()[0] == silent.getsockname()[0] == EVERYWHERE[family]


def test_a_socket_to_which_somebody_has_come_stays():
    before = listening.descriptors()
    with contextlib.ExitStack() as sockets:
        ours = sockets.enter_context(listener(socket.AF_INET))
        theirs = socket.create_connection(("127.0.0.1", ours.getsockname()[1]), 5)
        sockets.enter_context(theirs)
        assert listening.move_own("lo", before) == 0
        assert listening.listens_everywhere(ours)


def test_networks_are_interfaces_or_ranges():
    assert listening.address_in("127.0.0.0/8", socket.AF_INET) == "127.0.0.1"
    assert listening.address_in("127.0.0.0/8", socket.AF_INET6) == "::1"
    assert listening.address_in("::1/128", socket.AF_INET6) == "::1"
    assert listening.address_in("203.0.113.0/24", socket.AF_INET) is None
    assert listening.address_in("no-such-if", socket.AF_INET) is None
