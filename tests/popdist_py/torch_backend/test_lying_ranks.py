"""A rank that sends invalid data, as after memory corruption, is lost; the other ranks go on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import wait_until

from popdist_py.collectives.waiting import WaitLimits
from popdist_py.environment import CollectiveSettings
from popdist_py.torch_backend.membership.errors import RankLostError
from popdist_py.torch_backend.messages.channels import Header, Kind
from popdist_py.torch_backend.messages.endpoint import _CLAIM
from popdist_py.torch_backend.messages.messages import Messages

NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 4) | st.sampled_from([2**31, 2**63, 2**64 - 1])
HEADERS = st.builds(
    Header,
    st.integers(0, 12), st.integers(-(2**63), 2**63 - 1) | st.just(0), NUMBERS, NUMBERS, NUMBERS,
    NUMBERS, st.binary(max_size=16),
)  # fmt: skip


@contextlib.contextmanager
def opened():
    """Yield ranks 0 and 2 of three, and a function that connects to rank 0 as another rank."""
    store, died = dist.HashStore(), []
    wanted = CollectiveSettings(hang_timeout=20, shared_memory=False)
    before, threading.excepthook = threading.excepthook, died.append
    groups = [Messages(store, rank, 3, wanted, WaitLimits(20)) for rank in (0, 2)]
    # The listening socket of rank 1.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    name = listener.getsockname()[1:].decode()
    store.set("messages/1", json.dumps(json.loads(store.get("messages/0")) | {"unix": name}))

    def reach(rank=1):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        connection.connect("\0" + json.loads(store.get("messages/0"))["unix"])
        connection.sendall(_CLAIM.pack(rank, 0))
        return connection

    try:
        yield groups[0], groups[1], reach
    finally:
        for each in groups:
            each.close(seconds=0)
        listener.close()
        threading.excepthook = before
    assert not died, died[0]


@pytest.fixture
def ranks():
    with opened() as given:
        yield given


def exchanged(zero, two):
    """Tell whether ranks 0 and 2 still exchange small and large messages correctly."""
    for count in (3, 40_000):
        received, sent = torch.zeros(count), torch.arange(float(count))
        works = [zero.receive(received, 2, 5), two.send(sent, 0, 5)]
        for work in works:
            work.wait()
        assert torch.equal(received, sent)
    return True


@settings(max_examples=8)
@given(st.lists(HEADERS, min_size=1, max_size=6), st.binary(max_size=100))
def test_whatever_a_rank_says_the_others_go_on(headers, more):
    with opened() as (zero, two, reach), reach() as liar:
        waiting = zero.receive(torch.zeros(3), 1, 9)
        with contextlib.suppress(OSError):
            liar.sendall(b"".join(each.pack() for each in headers) + more)
        assert exchanged(zero, two)
        liar.close()
        with contextlib.suppress(RankLostError):
            waiting.wait()
        assert exchanged(zero, two)


def test_who_asks_twice_for_a_message_gets_it_and_ends_nothing(ranks):
    zero, two, reach = ranks
    with reach() as liar:
        large = torch.zeros(40_000)
        work = zero.send(large, 1, 0)
        del work
        liar.sendall(Header(Kind.REQUEST, number=1).pack() * 3)
        assert exchanged(zero, two)


def test_who_takes_another_rank_s_place_is_turned_away(ranks):
    zero, two, reach = ranks
    assert exchanged(zero, two)
    with reach(2) as thief, reach(0) as mirror, reach(7) as stranger:
        for each in (thief, mirror, stranger):
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
    assert exchanged(zero, two)


def test_what_nobody_waits_for_any_more_ends_no_connection(ranks):
    """The bytes for a failed receive arrive after another rank was lost."""
    zero, two, reach = ranks
    with reach(1) as slow:
        announced = Header(Kind.ANNOUNCED, 0, 1, 40_000, 160_000, dtype=b"float32")
        received = torch.zeros(40_000)
        work = zero.receive(received, 1, 0)
        slow.sendall(announced.pack())
        with pytest.raises(Exception, match=r"0\.2 s"):
            zero.wait(work, 0.2) or work.wait()
        two.close(seconds=0.1)
        with pytest.raises(RankLostError):
            zero.receive(torch.zeros(1), 2, 0).wait()
        slow.sendall(Header(Kind.DATA, 0, 1, 40_000, 160_000).pack() + os.urandom(160_000))
        small = Header(Kind.INLINE, 4, 2, 1, 4, dtype=b"float32")
        slow.sendall(small.pack() + bytes(4))
        zero.receive(torch.zeros(1), 1, 4).wait()
        assert not received.any()


FLOOD = """
import os, resource, select, socket, sys

resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
name = "\\0" + sys.argv[1]
os.setuid(65534)
held, met = [], 0
while not select.select([0], [], [], 0)[0]:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        stranger.connect(name)
        stranger.send(bytes(12))
        met += 1
    except OSError:
        pass
    held = [*held[-6000:], stranger]
print(met)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_who_floods_the_socket_keeps_no_rank_out(caplog):
    """Every user of the host may connect to an abstract socket."""
    with opened() as (zero, two, reach):
        with reach() as own:
            name = own.getpeername()[1:].decode()
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, name], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)  # fmt: skip
        try:
            # Rank 0 does not accept connections yet. Its queue is full, and a send must not block.
            wait_until(lambda: not has_room(name))
            sent = two.send(torch.ones(3), 0, 1)
            received = torch.zeros(3)
            zero.receive(received, 2, 1).wait()
            sent.wait()
            assert received.tolist() == [1, 1, 1]
            assert exchanged(zero, two)
        finally:
            met, _ = flood.communicate("enough", timeout=20)
        assert int(met) > 10
        assert caplog.text.count("is not of this job") == 1


def has_room(name):
    """Tell whether a socket accepts another connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as one:
        try:
            one.connect(f"\0{name}")
        except BlockingIOError:
            return False
        return True
