"""The gate: callers of the job are let in, whatever strangers do; strangers never are."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import wait_until

from popdist_py.peers import gate as gate_module
from popdist_py.peers import greeting
from popdist_py.peers.calls import Calls
from popdist_py.peers.gate import Gate, peer_of

SECRET, CLAIM = b"s" * 16, b"claim"
NOBODY = 65534


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@contextlib.contextmanager
def opened(kind="tcp", secret=SECRET):
    """Give a gate that listens, what it tells, its clock and its address; nothing stays open."""
    told, clock = [], Clock()
    gate = Gate(secret, len(CLAIM), 1, told.append, clock=clock)
    if kind == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen(200)
    gate.listen(listener)
    gate.told, gate.clock, gate.address = told, clock, listener.getsockname()
    try:
        yield gate
    finally:
        gate.close()


def stranger(gate, *words):
    """Return a stranger who has said something to a gate."""
    family = socket.AF_INET if isinstance(gate.address, tuple) else socket.AF_UNIX
    connection = socket.socket(family)
    connection.connect(gate.address)
    connection.settimeout(20)
    for each in words:
        connection.sendall(each)
    return connection


def let_in(gate, limit=20.0):
    """Return the connections of a caller and of the guest that it becomes, and its claim."""
    calls = Calls()
    calls.begin("me", gate.address, SECRET, CLAIM)
    mine, guests, end = [], [], time.monotonic() + limit
    with contextlib.closing(calls):
        while not (mine and guests):
            assert time.monotonic() < end
            select.select([gate, calls], [], [], 0.01)
            guests += gate.serve()
            mine += calls.serve()
    ((name, connection),) = mine
    assert name == "me"
    assert connection is not None
    return connection, guests[0].connection, guests[0].claim


def served(gate, connection):
    """Serve until the gate has closed a connection; return what it said."""
    connection.setblocking(False)
    said = b""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert gate.serve() == []
        with contextlib.suppress(BlockingIOError):
            try:
                part = connection.recv(100)
            except ConnectionResetError:
                return said
            if not part:
                return said
            said += part
    raise AssertionError("the connection stays open")


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_caller_and_a_guest_talk_at_once():
    with opened() as gate:
        mine, theirs, claim = let_in(gate)
        assert claim == CLAIM
        with mine, theirs:
            mine.send(b"hello")
            wait_until(lambda: select.select([theirs], [], [], 0)[0])
            assert theirs.recv(100) == b"hello"
        assert not gate.told
        assert not gate.has_pending


def test_words_that_follow_the_greeting_are_left_for_who_reads_them():
    with opened() as gate, stranger(gate, nonce := os.urandom(16)) as caller:
        wait_until(lambda: gate.serve() or select.select([caller], [], [], 0)[0])
        answered = caller.recv(100)
        caller.sendall(greeting.proof(SECRET, nonce, answered, CLAIM) + b"and more")
        guests = []
        wait_until(lambda: guests.extend(gate.serve()) or guests)
        assert guests[0].connection.recv(100) == b"and more"
        assert caller.recv(100) == greeting.LET_IN
        guests[0].connection.close()


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=4))
def test_random_bytes_are_turned_away(parts):
    before = descriptors()
    with opened() as gate, stranger(gate, *parts) as connection:
        if sum(map(len, parts)) >= 16 + greeting.PROOF_BYTES + len(CLAIM):
            assert len(served(gate, connection)) in (0, greeting.ANSWER_BYTES)
            assert gate.told == [
                "127.0.0.1 has connected and is not of this job: its connection was closed; "
                "further rejected connections are not reported"
            ]
        let_in_and_closed(gate)
    assert descriptors() <= before  # fewer if an object of another test was collected


def let_in_and_closed(gate):
    for connection in let_in(gate)[:2]:
        connection.close()


def test_who_says_nothing_or_little_delays_nobody_and_is_let_go():
    with opened() as gate, stranger(gate) as silent, stranger(gate, b"x") as slow:
        let_in_and_closed(gate)
        assert not gate.told
        gate.clock.now = gate_module.GREETING_SECONDS - 1
        slow.sendall(b"x")  # that it says something gives it no more time
        with stranger(gate) as later:
            assert gate.serve() == []
            gate.clock.now += 2
            assert served(gate, silent) == b""
            assert served(gate, slow) == b""
            assert gate.has_pending
            assert len(gate.told) == 1
            gate.clock.now += gate_module.GREETING_SECONDS
            served(gate, later)


def test_a_crowd_has_no_more_descriptors_than_it_may_and_keeps_nobody_out():
    with opened() as gate, contextlib.ExitStack() as crowd:
        before = descriptors()
        strangers = [crowd.enter_context(stranger(gate)) for _ in range(120)]
        wait_until(lambda: gate.serve() or not select.select([gate], [], [], 0)[0])
        assert descriptors() - before - len(strangers) <= 1 + gate_module._EXTRA_PENDING
        let_in_and_closed(gate)
        assert len(gate.told) == 1
        assert _is_open(strangers[-1])
        assert not _is_open(strangers[0])  # who came first goes first


def _is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_a_crowd_of_one_host_turns_nobody_of_another_away():
    with opened() as gate, contextlib.ExitStack() as crowd:
        other = crowd.enter_context(
            socket.create_connection(gate.address, source_address=("127.0.0.9", 0))
        )
        for _ in range(120):
            crowd.enter_context(stranger(gate))
        wait_until(lambda: gate.serve() or not select.select([gate], [], [], 0)[0])
        assert _is_open(other)


def test_who_is_turned_away_by_a_crowd_calls_again():
    calls = Calls()
    with opened() as gate, contextlib.closing(calls), contextlib.ExitStack() as crowd:
        calls.begin("me", gate.address, SECRET, CLAIM)
        wait_until(lambda: calls.serve() or select.select([gate], [], [], 0)[0])
        gate.serve()  # it has been answered
        for _ in range(120):
            crowd.enter_context(stranger(gate))
        wait_until(lambda: gate.serve() or not select.select([gate], [], [], 0)[0])
        guests, ended = [], []
        wait_until(lambda: ended.extend(calls.serve()) or guests.extend(gate.serve()) or ended)
        assert ended[0][1] is not None
        assert [each.claim for each in guests] == [CLAIM]
        ended[0][1].close()
        guests[0].connection.close()


def test_descriptors_that_strangers_hold_are_taken_from_them():
    with opened() as gate, contextlib.ExitStack() as crowd:
        held = [crowd.enter_context(stranger(gate)) for _ in range(5)]
        wait_until(lambda: gate.serve() or not select.select([gate], [], [], 0)[0])
        calls = Calls()
        calls.begin("me", gate.address, SECRET, CLAIM)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(each.name) for each in Path("/proc/self/fd").iterdir() if each.exists())
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            guests, ended = [], []
            wait_until(lambda: ended.extend(calls.serve()) or guests.extend(gate.serve()) or ended)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in fillers:
                os.close(each)
            calls.close()
        assert len(guests) == 1
        assert not _is_open(held[0])
        ended[0][1].close()
        guests[0].connection.close()


def test_a_listener_that_is_not_ours_is_told_nothing():
    with opened(secret=b"another") as gate, contextlib.closing(Calls()) as calls:
        calls.begin("me", gate.address, SECRET, CLAIM)
        ended = []
        wait_until(lambda: gate.serve() or ended.extend(calls.serve()) or ended)
        assert ended == [("me", None)]
        wait_until(lambda: gate.serve() or not gate.has_pending)


def test_a_recorded_caller_is_turned_away():
    with opened() as gate, socket.create_server(("127.0.0.1", 0)) as between:
        recorded = _recorded_call(gate, between)
        with stranger(gate, recorded) as connection:
            assert len(served(gate, connection)) == greeting.ANSWER_BYTES
        assert len(gate.told) == 1


def _recorded_call(gate, between):
    """Let somebody call through another, and return all that the caller said."""
    calls, guests, said = Calls(), [], b""
    calls.begin("me", between.getsockname(), SECRET, CLAIM)
    caller, theirs = between.accept()[0], stranger(gate)
    with caller, theirs, contextlib.closing(calls):
        while not guests:
            calls.serve()
            guests += gate.serve()
            for one, other in ((caller, theirs), (theirs, caller)):
                if select.select([one], [], [], 0)[0]:
                    data = one.recv(100)
                    other.sendall(data)
                    said += data if one is caller else b""
    guests[0].connection.close()
    return said


def test_nobody_is_called_for_ever_who_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with contextlib.closing(Calls()) as calls:
        ended = []
        try:
            calls.begin("me", address, SECRET, CLAIM)
        except ConnectionRefusedError:
            return
        wait_until(lambda: ended.extend(calls.serve()) or ended)
        assert ended == [("me", None)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_this_host_is_turned_away_by_name():
    with opened("unix") as gate:
        with stranger(gate, CLAIM) as own:
            guests = gate.serve()
            assert [(each.claim, each.pid) for each in guests] == [(CLAIM, os.getpid())]
            assert peer_of(own)[1] == os.geteuid()
            guests[0].connection.close()
        child = os.fork()
        if not child:
            os.setuid(NOBODY)
            try:
                with stranger(gate, CLAIM) as theirs:
                    os._exit(0 if _all_of(theirs) == b"" else 1)
            except ConnectionError:  # it was turned away before it had sent its claim
                os._exit(0)
            finally:
                os._exit(2)
        guests = []
        wait_until(lambda: guests.extend(gate.serve()) or gate.told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert guests == []
        assert gate.told[0].startswith(f"a process of user {NOBODY} has connected and is not of")


def _all_of(connection):
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


def test_a_closed_gate_and_closed_calls_do_nothing():
    gate, calls = Gate(SECRET, 0, 1, print), Calls()
    gate.close()
    calls.close()
    assert gate.serve() == calls.serve() == []


def test_who_leaves_with_a_reset_is_forgotten():
    with opened() as gate:
        connection = stranger(gate, b"x")
        gate.serve()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait_until(lambda: gate.serve() or not gate.has_pending)
