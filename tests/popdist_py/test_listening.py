"""Sockets that listen on every address, and how they are moved to one."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys

import pytest

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


def free_port() -> int:
    with listener(socket.AF_INET) as found:
        return found.getsockname()[1]


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


OTHER = """
import socket, sys
everywhere = [socket.create_server(("", 0))]
everywhere.append(socket.create_server(("::", 0), family=socket.AF_INET6))
print(*(each.getsockname()[1] for each in everywhere), flush=True)
sys.stdin.readline()
for each in everywhere:
    print(each.getsockname()[0], each.accept()[0] is not None, flush=True)
"""


def test_sockets_of_another_process_move():
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        ports = [*map(int, other.stdout.readline().split())]
        assert sorted(listening.move_of(other.pid, "lo")) == sorted(ports)
        assert listening.move_of(other.pid, "lo") == []
        other.stdin.write("\n")
        other.stdin.flush()
        for address, port in zip(("127.0.0.1", "::1"), ports, strict=True):
            with socket.create_connection((address, port), 5):
                assert other.stdout.readline().split() == [address, "True"]


def test_a_process_that_is_gone_is_an_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
        with pytest.raises(OSError):
            listening.move_of(other.pid, "lo")


def test_networks_are_interfaces_or_ranges():
    assert listening.address_in("127.0.0.0/8", socket.AF_INET) == "127.0.0.1"
    assert listening.address_in("127.0.0.0/8", socket.AF_INET6) == "::1"
    assert listening.address_in("::1/128", socket.AF_INET6) == "::1"
    assert listening.address_in("203.0.113.0/24", socket.AF_INET) is None
    assert listening.address_in("no-such-if", socket.AF_INET) is None
