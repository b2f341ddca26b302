"""All-reduce over TCP with threads as hosts, lost connections, children and unknown callers."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import connections

from popdist_py.collectives.arithmetic import FUNCTIONS
from popdist_py.collectives.between_hosts import tcp_connect
from popdist_py.collectives.between_hosts.mesh import VALUES, ConnectionLostError
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup, max_compared_bytes
from popdist_py.collectives.between_hosts.tcp import TcpMesh
from popdist_py.collectives.waiting import WaitLimits
from popdist_py.peers import greeting
from popdist_py.peers.silence import SILENT_SECONDS

LIMIT = 30


def meshes(count):
    """Return the meshes of ``count`` ranks that are connected to one another."""
    ends = [({}, {}) for _ in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for first, second in combinations(range(count), 2):
            for kind in (0, 1):
                ends[first][kind][second] = socket.create_connection(listener.getsockname())
                ends[second][kind][first] = listener.accept()[0]
    return [TcpMesh(rank, *kinds) for rank, kinds in enumerate(ends)]


def finish(mesh, all_reduces):
    end = time.monotonic() + LIMIT
    while not all(all_reduce.is_done for all_reduce in all_reduces):
        assert time.monotonic() < end, "the all_reduces do not end"
        mesh.progress(0.1)


@given(
    count=st.integers(2, 4),
    sizes=st.lists(st.sampled_from([0, 1, 3, 100, 9_000, 70_001]), min_size=1, max_size=6),
    op=st.sampled_from(sorted(FUNCTIONS)),
    seed=st.integers(0, 99),
)
def test_all_ranks_end_with_the_values_reduced_in_order(count, sizes, op, seed):
    generator = np.random.default_rng(seed)
    dtype = np.int32 if op in {"band", "bor", "bxor"} else np.float32
    given_values = [
        [generator.normal(size=size).astype("f4").view(dtype) for _ in range(count)]
        for size in sizes
    ]
    expected = []
    for rows in given_values:
        total = rows[0].copy()
        for row in rows[1:]:
            total = FUNCTIONS[op](total, row)
        expected.append(total)

    def run(mesh):
        arrays = [rows[mesh.rank].copy() for rows in given_values]
        finish(mesh, [mesh.start_all_reduce(array, FUNCTIONS[op]) for array in arrays])
        return arrays

    connected = meshes(count)
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, connected))
    for mesh in connected:
        mesh.close()
    for arrays in results:
        for array, total in zip(arrays, expected, strict=True):
            assert np.array_equal(array, total)


@pytest.mark.parametrize("count", [2, 3])
def test_arrays_are_reduced_with_the_comparison_only_if_the_calls_are_equal(count):
    longest = max_compared_bytes(count) // 4

    def run(mesh):
        group, rank = MeshGroup(mesh, range(count), WaitLimits(LIMIT)), mesh.rank
        arrays = [np.full(size, 10.0**rank, "f4") for size in (5, longest, rank * 99, 1)]
        verdicts = [group.compare(7, rank, "call", array) for array in arrays[:2]]
        # The messages of calls that differ have different lengths.
        verdicts.append(group.compare(7 + rank, 0, "call", arrays[2]))
        verdicts.append(group.compare(7, 1, "call"))
        verdicts.append(group.compare(7, 0, "call", arrays[3], "max"))
        return verdicts, arrays

    connected = meshes(count)
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, connected))
    for mesh in connected:
        mesh.close()
    for rank, (verdicts, arrays) in enumerate(results):
        assert verdicts == [(True, count - 1)] * 2 + [(False, 0), (True, 1), (True, 0)]
        total = sum(10**other for other in range(count))
        wanted = [total, total, 10**rank, 10 ** (count - 1)]
        for array, value in zip(arrays, wanted, strict=True):
            assert np.all(array == value)


@settings(max_examples=15)
@given(count=st.integers(2, 4), seed=st.integers(0, 99))
def test_ranks_exchange_arrays_of_any_sizes_between_all_reduces(count, seed):
    generator = np.random.default_rng(seed)
    sizes = generator.choice([0, 1, 1000, 300_000], size=(count, count))

    def run(mesh):
        own = mesh.rank
        outgoing = [
            np.full(size, 10 * own + other, np.uint8) for other, size in enumerate(sizes[own])
        ]
        incoming = [np.empty(size, np.uint8) for size in sizes[:, own]]
        first, last = np.ones(5000), np.ones(3)
        requests = [mesh.start_all_reduce(first, np.add), mesh.start_exchange(outgoing, incoming)]
        finish(mesh, [*requests, mesh.start_all_reduce(last, np.add)])
        assert (first == count).all()
        assert (last == count).all()
        return incoming

    connected = meshes(count)
    with ThreadPoolExecutor(count) as pool:
        for own, received in enumerate(pool.map(run, connected)):
            for other, array in enumerate(received):
                assert other == own or (array == 10 * other + own).all()
    for mesh in connected:
        mesh.close()


def test_values_leave_before_the_sum_takes_their_place():
    size = 3_000_000  # more bytes than a connection buffers
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = [
            (socket.create_connection(listener.getsockname()), listener.accept()[0])
            for _ in range(2)
        ]
    (ours, theirs), (our_sums, their_sums) = pairs
    mesh = TcpMesh(0, {1: ours}, {1: our_sums})
    array = np.ones(size)
    all_reduce = mesh.start_all_reduce(array, np.add)

    def peer():
        theirs.sendall(np.full(size, 2.0))
        everything_sent.set()
        got = np.empty(size)
        view = memoryview(got).cast("B")
        while len(view):
            view = view[theirs.recv_into(view) :]
        return got

    everything_sent = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(peer)
        while not everything_sent.is_set():
            mesh.progress(0.1)
        finish(mesh, [all_reduce])
        assert (other.result(LIMIT) == 1).all()
    assert (array == 3).all()
    mesh.close()
    theirs.close()
    their_sums.close()


class SilentConnection(socket.socket):
    """Return a connection whose other end does not answer, according to the kernel."""

    retransmits, silent_seconds = 5, SILENT_SECONDS + 1

    def getsockopt(self, level, option, size=0):
        info = bytearray(super().getsockopt(level, option, size))
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO):
            info[2] = self.retransmits
            info[56:60] = (1000 * self.silent_seconds).to_bytes(4, sys.byteorder)
        return bytes(info)


@pytest.mark.parametrize(
    ("retransmits", "silent_seconds", "is_lost"),
    [
        (5, SILENT_SECONDS + 1, True),
        (5, SILENT_SECONDS - 1, False),  # a network that stalls
        (0, SILENT_SECONDS + 1, False),  # a program that is late: nothing waits for an answer
    ],
)
def test_a_rank_whose_host_does_not_answer_is_lost(retransmits, silent_seconds, is_lost):
    first, second = meshes(2)
    stream = first._streams[VALUES][1]
    silent = SilentConnection(fileno=os.dup(stream.connection.fileno()))
    silent.setblocking(False)
    silent.retransmits, silent.silent_seconds = retransmits, silent_seconds
    first._streams_by_descriptor[silent.fileno()] = stream
    del first._streams_by_descriptor[stream.connection.fileno()]
    stream.connection.close()
    stream.connection = silent
    first.start_all_reduce(np.ones(10), np.add)
    if is_lost:
        with pytest.raises(ConnectionLostError) as error:
            first.progress(0.01)
        assert (error.value.rank, error.value.is_silent) == (1, True)
    else:
        assert first.progress(0.01) is False
    first.close()
    second.close()


def test_the_kernel_looks_after_a_connection_on_which_nothing_is_sent():
    first, second = meshes(2)
    with contextlib.closing(first), contextlib.closing(second):
        for stream in first._streams_by_descriptor.values():
            told = [
                stream.connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert told[0] + told[1] * told[2] == SILENT_SECONDS
            assert stream.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            # The kernel's limit would end a connection to a program that reads late.
            assert not stream.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_rank_that_leaves_is_named():
    first, second, third = meshes(3)
    third.close()
    with pytest.raises(ConnectionLostError) as error:
        finish(first, [first.start_all_reduce(np.ones(100_000), np.add)])
    assert error.value.rank == 2
    first.close()
    second.close()


def test_values_of_a_rank_that_has_not_started_are_missing():
    first, second, third = meshes(3)
    all_reduce = first.start_all_reduce(np.ones(100_000), np.add)
    second.start_all_reduce(np.ones(100_000), np.add)
    for _ in range(50):
        first.progress(0.01)
        second.progress(0.01)
    assert all_reduce.missing_values == {2}
    for mesh in (first, second, third):
        mesh.close()


def test_a_child_keeps_no_connection_open():
    first, second = meshes(2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # the parent must first see the end of the connection
        os._exit(0)
    first.close()
    try:
        with pytest.raises(ConnectionLostError):
            finish(second, [second.start_all_reduce(np.ones(10), np.add)])
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        second.close()


class _Meeting:
    """A meeting for ``connect`` between several threads, in one of them."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather(self, value):
        values, barrier = self._shared
        values[self.rank] = value
        barrier.wait(LIMIT)
        everything = list(values)
        barrier.wait(LIMIT)
        return everything

    def broadcast(self, value):
        return self.all_gather(value)[0]


def connect(count):
    shared = ([None] * count, threading.Barrier(count))
    with ThreadPoolExecutor(count) as pool:
        ranks = [
            pool.submit(tcp_connect.connect, _Meeting(r, count, shared), None) for r in range(count)
        ]
        return [rank.result(LIMIT) for rank in ranks]


@pytest.mark.parametrize("count", [2, 4])
def test_connecting_leaves_nobody_listening(count):
    before = _listening()
    found = connect(count)
    assert [mesh.rank for mesh in found] == list(range(count))
    assert _listening() == before

    def run(mesh):
        array = np.full(50_000, mesh.rank + 1.0)
        finish(mesh, [mesh.start_all_reduce(array, np.add)])
        return array

    with ThreadPoolExecutor(count) as pool:
        for array in pool.map(run, found):
            assert (array == count * (count + 1) / 2).all()
    for mesh in found:
        mesh.close()


def _listening():
    """Return the TCP ports on which this process listens."""
    import psutil

    return {c.laddr.port for c in connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def crowded(monkeypatch):
    """Connect unknown callers to each listener, before the ranks connect.

    Each caller sends one of the ``words``.
    """
    real, strangers, words = socket.create_server, [], []

    def server(*args, **kwargs):
        listener = real(*args, **kwargs)
        for each in words:
            strangers.append(stranger := socket.create_connection(listener.getsockname()))
            stranger.sendall(each)
        return listener

    monkeypatch.setattr(socket, "create_server", server)
    yield words, strangers
    for stranger in strangers:
        stranger.close()


def test_strangers_neither_delay_anybody_nor_are_let_in(crowded, caplog):
    words, strangers = crowded
    # The callers send an older greeting, half a greeting, an empty text, other protocols, or are
    # too many.
    words += [b"\0" * 16 + b"v" + (1).to_bytes(4, "big"), b"\0" * 80, b"\0" * 15]
    words += [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 70_000, *[b""] * 100]
    before = len(connections("tcp"))
    found = connect(2)
    assert None not in found
    arrays = [np.full(1000, mesh.rank + 1.0) for mesh in found]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m, a: finish(m, [m.start_all_reduce(a, np.add)]), found, arrays))
    assert (arrays[0] == 3).all()
    for stranger in strangers:
        stranger.settimeout(LIMIT)
        assert len(_all_of(stranger)) in (0, greeting.ANSWER_BYTES)
        stranger.close()
    for mesh in found:
        mesh.close()
    assert len(connections("tcp")) <= before
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all(text.startswith("127.0.0.1 has connected and is not of this job") for text in told)
    assert len(told) <= 2  # each rank warns of the first caller


def test_the_secret_of_the_job_is_needed_as_well_as_that_of_the_meeting(monkeypatch):
    secrets_of_ranks = iter([b"one", b"another"])
    monkeypatch.setattr(tcp_connect, "job_secret", lambda _: next(secrets_of_ranks))
    monkeypatch.setattr(tcp_connect, "_TIMEOUT_SECONDS", 0.3)
    assert connect(2) == [None, None]


def _all_of(connection):
    """Return the bytes that arrive until the other end closes the connection."""
    data = b""
    try:
        while part := connection.recv(1000):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_host_finds_the_interface_that_leads_to_another():
    assert tcp_connect.own_address(None, {"a", "b"}, "192.0.2.1") != "127.0.0.1"
    assert tcp_connect.address_towards("127.0.0.1") is None
    assert tcp_connect.address_towards("no such host.invalid") is None


def test_a_host_that_leads_nowhere_goes_towards_the_others(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: f"host {threading.get_ident()}")
    addresses = {"first": "127.0.0.2", "127.0.0.2": "127.0.0.3"}
    monkeypatch.setattr(
        tcp_connect, "address_towards", lambda host: asked.append(host) or addresses.get(host)
    )
    monkeypatch.setattr(tcp_connect, "_addresses_of", lambda _: ["127.0.0.1", "fe80::1"])
    shared = ([None] * 2, threading.Barrier(2))
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(tcp_connect.connect, _Meeting(rank, 2, shared), None, towards)
            for rank, towards in enumerate(["nowhere", "first"])
        ]
        meshes = [rank.result(LIMIT) for rank in ranks]
    assert None not in meshes
    assert sorted(asked) == ["127.0.0.2", "first", "nowhere"]
    for mesh in meshes:
        mesh.close()


def test_connections_over_ipv6(monkeypatch):
    monkeypatch.setattr(tcp_connect, "own_address", lambda *_: "::1")
    meshes = connect(2)
    assert None not in meshes
    for mesh in meshes:
        mesh.close()


def test_an_address_of_ipv6_is_taken_where_there_is_no_other(monkeypatch):
    behind = {"fd00::1": ["fd00::1"], "near": ["fe80::1", "::1"]}
    monkeypatch.setattr(tcp_connect, "_addresses_of", lambda _: behind[socket.gethostname()])
    for name, expected in {"fd00::1": "fd00::1", "near": None}.items():
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert tcp_connect.own_address(None, {"a", "b"}) == expected
    assert tcp_connect.own_address("lo", {"a", "b"}) == "127.0.0.1"
    assert tcp_connect.own_address("::1/128", {"a", "b"}) == "::1"
    assert tcp_connect.own_address("fd00:9::/64", {"a", "b"}) is None


def test_hosts_that_do_not_reach_one_another_use_mpi(monkeypatch):
    monkeypatch.setattr(tcp_connect, "own_address", lambda *_: None)
    assert connect(2) == [None, None]
