"""Connections to the launcher, which admits its own wrappers and refuses all other processes."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.peers import greeting
from popdist_py.peers.calls import Calls
from poprun_py.instance import control_protocol, program_environment
from poprun_py.running.supervise import connection
from poprun_py.running.supervise.connection import Hello, parse_hello
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.launcher_folder import SOCKET_NAME

MAIN = ROOT / "poprun_py" / "instance" / "start_wrapper.py"
DEEP = b"[" * 100_000
HELLO = {"rank": 0, "pid": 1, "host": "here"}


class Events:
    """Records the events of a control channel."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *what: self.told.append((name, *what))

    def said(self):
        return b"".join(each[3] for each in self.told if control_protocol.STDOUT in each).decode()

    def names(self):
        return [each[0] for each in self.told]


@pytest.fixture
def opened(tmp_path):
    """Yield a channel with both kinds of sockets, its events, and a function that runs its loop."""
    channel = ControlChannel(1, events := Events())
    with selectors.DefaultSelector() as selector:
        channel.open(selector, tmp_path, "127.0.0.1")

        def turn(seconds=0.01):
            for key, mask in selector.select(seconds):
                key.data(key.fileobj, mask)
            channel.on_time(time.monotonic())

        yield channel, events, turn
        channel.close()
        assert selector.get_map() is None or len(selector.get_map()) <= 1


def port_of(channel):
    return int(channel.address.rpartition(":")[2])


def wrapper(address, token, *program):
    return subprocess.Popen(
        [sys.executable, "-I", "-S", MAIN, "--", *program],
        env={**os.environ, "POPRUN_CONTROL": address, "POPRUN_TOKEN": token, "RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended(process):
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def greeted(channel, turn):
    """Return the connection of a wrapper that has shown the token and sent no frame yet."""
    calls, done = Calls(), []
    calls.begin("me", ("127.0.0.1", port_of(channel)), channel.token.encode(), b"")
    with contextlib.closing(calls):
        wait_until(lambda: turn() or done.extend(calls.serve()) or done)
    return done[0][1]


def test_a_wrapper_of_another_host_connects_and_its_program_gets_its_own_secret(opened):
    channel, events, turn = opened
    code = "import os; print(os.environ['POPDIST_SECRET'], 'POPRUN_TOKEN' in os.environ, end='')"
    with ended(wrapper(channel.address, channel.token, sys.executable, "-c", code)):
        wait_until(lambda: turn() or channel.is_complete)
        channel.send_to(0, control_protocol.GO, {"variables": {}})
        wait_until(lambda: turn() or events.said().endswith("False"))
        assert events.said().split() == [
            program_environment.programs_secret(channel.token),
            "False",
        ]
        assert channel.token not in events.said()
        # The channel accepts no further connections.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port_of(channel)))
    assert "stranger_refused" not in events.names()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        control_protocol.pack(
            control_protocol.HELLO, json.dumps({**HELLO, "token": "x" * 32}).encode()
        ),
        control_protocol.pack(control_protocol.HELLO, DEEP),
        control_protocol.HELLO + (control_protocol.MAX_PAYLOAD).to_bytes(4, "big") + b"x" * 100_000,
        control_protocol.HELLO + b"\xff\xff\xff\xff" + b"x" * 100_000,
        b"\0" * 48 + control_protocol.pack(control_protocol.INSPECT, b'"stacks"'),
    ],
    ids=["silent", "slow", "http", "token", "deep", "large", "huge", "inspect"],
)
def test_strangers_on_a_network_are_refused_and_do_not_delay_wrappers(opened, words):
    channel, events, turn = opened
    address = ("127.0.0.1", port_of(channel))
    with contextlib.ExitStack() as crowd:
        for _ in range(80):
            stranger = crowd.enter_context(socket.create_connection(address))
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(words)
        # The channel does not store their data, nor reserve memory for announced frames.
        tracemalloc.start()
        for _ in range(20):
            turn(0.001)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        with ended(wrapper(channel.address, channel.token, "true")):
            wait_until(lambda: turn() or channel.is_complete)
            assert [name for name in events.names() if name == "connected"] == ["connected"]
            refused = [each for each in events.told if each[0] == "stranger_refused"]
            assert [each[1].partition(" has ")[0] for each in refused] == ["127.0.0.1"]


def test_a_refused_wrapper_connects_again(opened):
    channel, _, turn = opened
    with socket.create_server(("127.0.0.1", 0)) as crowded:
        host, port = crowded.getsockname()
        with ended(wrapper(f"tcp:{host}:{port}", channel.token, "true")):
            for limit in (0, 16):
                with crowded.accept()[0] as connection:
                    connection.recv(limit) if limit else None
            # The third time it reaches the launcher.
            theirs, ours = crowded.accept()[0], socket.create_connection((host, port_of(channel)))
            with theirs, ours:
                _pass_on(theirs, ours, lambda: turn() or channel.is_complete)


def _pass_on(one, other, is_done):
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)

        def step():
            for key, _ in selector.select(0):
                key.data.sendall(key.fileobj.recv(1000))
            return is_done()

        wait_until(step)


def test_a_wrapper_refuses_a_launcher_without_the_token(tmp_path):
    token = "a secret of thirty-two characters"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        with ended(wrapper(address, token, "touch", str(tmp_path / "started"))) as process:
            with listener.accept()[0] as connection:
                called = connection.recv(1000)
                connection.sendall(greeting.answer(b"another", called, b"n" * 16) + greeting.LET_IN)
                go = json.dumps({"variables": {}}).encode()
                with contextlib.suppress(OSError):
                    connection.sendall(control_protocol.pack(control_protocol.GO, go))
                    assert connection.recv(1000) == b""
            _, said = process.communicate(timeout=60)
    assert len(called) == greeting.NONCE_BYTES
    assert process.returncode == 1
    where = address.removeprefix("tcp:")
    assert said == f"poprun-py: the process at {where} is not the launcher of this job\n"
    assert not (tmp_path / "started").exists()


def test_a_recorded_handshake_is_refused(opened):
    channel, events, turn = opened
    recorded = []
    with socket.create_server(("127.0.0.1", 0)) as between:
        host, port = between.getsockname()
        with ended(wrapper(f"tcp:{host}:{port}", channel.token, "true")):
            theirs, ours = between.accept()[0], socket.create_connection((host, port_of(channel)))
            with theirs, ours:
                recorded.append(theirs.recv(1000))
                ours.sendall(recorded[-1])
                wait_until(lambda: turn() or _can_read(ours))
                theirs.sendall(ours.recv(1000))
                wait_until(lambda: _can_read(theirs))
                recorded.append(theirs.recv(1000))
    with socket.create_connection((host, port_of(channel))) as thief:
        thief.setblocking(False)
        thief.sendall(recorded[0])
        wait_until(lambda: turn() or _can_read(thief))
        assert len(thief.recv(1000)) == greeting.ANSWER_BYTES
        thief.sendall(
            recorded[1] + control_protocol.pack(control_protocol.HELLO, json.dumps(HELLO).encode())
        )
        wait_until(lambda: turn() or _can_read(thief))
        with contextlib.suppress(ConnectionResetError):
            assert thief.recv(1000) == b""
    assert "connected" not in events.names()


def _can_read(connection):
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


@pytest.mark.parametrize("nonsense", [DEEP, b"\xff", b"{", b"[1, ]"])
def test_a_wrapper_that_sends_invalid_json_is_disconnected(opened, nonsense):
    channel, events, turn = opened
    with greeted(channel, turn) as wrapped:
        wrapped.sendall(control_protocol.pack(control_protocol.HELLO, json.dumps(HELLO).encode()))
        wait_until(lambda: turn() or channel.is_complete)
        wrapped.sendall(control_protocol.pack(control_protocol.STARTED, nonsense))
        wait_until(lambda: turn() or "disconnected" in events.names())
    assert events.names() == ["connected", "disconnected"]


def test_an_invalid_first_frame_is_refused_even_with_the_token(opened):
    channel, events, turn = opened
    for words in (b"x" * 9, control_protocol.pack(control_protocol.HELLO, DEEP),
                  control_protocol.pack(
                      control_protocol.HELLO, json.dumps({**HELLO, "rank": 1}).encode()
                  ),
                  control_protocol.pack(control_protocol.INSPECT, b'"stacks"')):  # fmt: skip
        with greeted(channel, turn) as wrapped:
            wrapped.settimeout(0)
            wrapped.sendall(words)
            wait_until(lambda wrapped=wrapped: turn() or _can_read(wrapped))
            with contextlib.suppress(ConnectionResetError):
                assert wrapped.recv(100) == b""
    assert events.told == []


def test_a_wrapper_on_this_host_sends_the_token_in_its_first_frame(opened, tmp_path):
    channel, events, turn = opened
    for token in ("", "\udcff", "x" * 32, channel.token):
        with socket.socket(socket.AF_UNIX) as wrapped:
            wrapped.connect(str(tmp_path / "control"))
            hello = json.dumps({**HELLO, "token": token}).encode()
            wrapped.sendall(control_protocol.pack(control_protocol.HELLO, hello))
            wait_until(
                lambda wrapped=wrapped: (
                    turn() or _can_read(wrapped) or events.names() == ["connected"]
                )
            )
    assert events.names()[:1] == ["connected"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NAMES = st.sampled_from(["rank", "pid", "host", "token", "port", "time_ns", "else"])


@given(
    st.sampled_from([control_protocol.HELLO, control_protocol.BYE, b"\0"]),
    st.binary() | st.builds(json.dumps, VALUES | st.dictionaries(NAMES, VALUES)).map(str.encode),
)
@example(control_protocol.HELLO, DEEP)
@example(control_protocol.HELLO, b'{"rank": 0, "pid": Infinity, "host": "h"}')
@example(control_protocol.HELLO, b'{"rank": ' + b"9" * 5000 + b', "pid": 1, "host": "h"}')
@example(control_protocol.HELLO, json.dumps(HELLO).encode())
def test_any_bytes_are_a_first_frame_or_refused(kind, payload):
    try:
        hello = parse_hello(kind, payload)
    except ValueError:
        assert json.dumps(HELLO).encode() != payload
        return
    assert kind == control_protocol.HELLO
    assert isinstance(hello, Hello)
    assert [type(n) for n in (hello.rank, hello.pid, hello.port, hello.time_ns)] == [int] * 4
    assert isinstance(hello.host, str)


def test_an_unreachable_host_is_disconnected_although_data_was_sent_to_it(opened, monkeypatch):
    channel, events, turn = opened
    with ended(wrapper(channel.address, channel.token, "sleep", "60")):
        wait_until(lambda: turn() or channel.is_complete)
        seen = []
        monkeypatch.setattr(
            "popdist_py.peers.silence.is_silent",
            lambda _, seconds: seen.append(seconds) or len(seen) > 1,
        )
        wait_until(lambda: turn() or "disconnected" in events.names())
        assert seen == [control_protocol.LOST_AFTER_SECONDS] * 2
        assert not channel.peers[0].connection.is_open


def test_wrappers_for_the_next_attempt_connect_beside_the_present_one(opened, tmp_path):
    channel, events, turn = opened
    ahead, address = Events(), f"unix:{tmp_path / SOCKET_NAME}"
    with ended(wrapper(address, channel.token, "sleep", "60")) as first:
        wait_until(lambda: turn() or channel.is_complete)
        with ended(wrapper(address, channel.token, "sleep", "60")) as refused:
            wait_until(lambda: turn() or refused.poll() is not None)
        channel.await_next((0,), ahead)
        with ended(wrapper(address, channel.token, "sleep", "60")) as second:
            wait_until(lambda: turn() or "connected" in ahead.names())
            assert [channel.peers[0].pid, channel.next_peers[1].pid] == [first.pid, second.pid]
            assert events.names() == ["connected"]
            channel.begin_next(events, {0: 1}, 1)
            assert (channel.peers[0].pid, channel.next_peers) == (second.pid, {})
            channel.send_to(0, control_protocol.GO, {"variables": {}})
            wait_until(lambda: turn() or "received" in events.names())
            assert ahead.names() == ["connected"]


def test_a_wrapper_without_a_next_program_removes_the_states_of_its_host(opened, tmp_path):
    channel, events, turn = opened
    states = tmp_path / "poprun-states-0123456789ab"
    states.mkdir(mode=0o700)
    address = f"unix:{tmp_path / SOCKET_NAME}"
    with ended(wrapper(address, channel.token, "true")) as dismissed:
        wait_until(lambda: turn() or channel.is_complete)
        variables = {"POPDIST_CHECKPOINT_MEMORY": str(states)}
        channel.send_to(0, control_protocol.GO, {"variables": variables})
        is_ended = control_protocol.INSTANCE_ENDED
        wait_until(lambda: turn() or any(is_ended in each for each in events.told))
        assert states.exists()
        channel.begin_next(events, {}, 1)
        wait_until(lambda: turn() or dismissed.poll() is not None)
        assert not states.exists()


def inspect(folder, events, turn):
    """Return a connection that has requested the status, and the function that answers it."""
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(str(folder / SOCKET_NAME))
    asked.sendall(control_protocol.pack(control_protocol.INSPECT, b'"status"'))
    wait_until(lambda: turn() or "inspected" in events.names())
    return asked, next(each[2] for each in events.told if each[0] == "inspected")


def test_a_long_answer_is_sent_in_several_frames(opened, tmp_path):
    _, events, turn = opened
    asked, answer = inspect(tmp_path, events, turn)
    text = "\u00e4" * (3 << 19)
    with asked:
        answer(text)
        asked.setblocking(False)
        reader, payloads, is_open = control_protocol.Reader(), [], True
        while is_open:
            turn()
            with contextlib.suppress(BlockingIOError):
                is_open = bool(data := asked.recv(1 << 18))
                payloads += [payload for _, payload in reader.feed(data)]
    assert len(payloads) == 3
    assert b"".join(payloads).decode() == text


def test_an_inspection_that_does_not_read_blocks_nothing_and_is_closed_after_a_while(
    opened, tmp_path, monkeypatch
):
    channel, events, turn = opened
    asked, answer = inspect(tmp_path, events, turn)
    with asked:
        # These calls must not wait for the reader.
        answer("x" * (3 << 20))
        turn()
        monkeypatch.setattr(connection, "_READER_SECONDS", 0.0)
        channel.on_time(time.monotonic() + 2.0)
        turn()
        wait_until(lambda: not asked.recv(1 << 18))


@pytest.mark.parametrize(
    "said", [b"", control_protocol.pack(control_protocol.INSPECT, b'"stacks"')]
)
def test_other_connections_are_closed_at_the_end(tmp_path, said):
    channel = ControlChannel(1, events := Events())
    with (
        selectors.DefaultSelector() as selector,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking,
    ):
        channel.open(selector, tmp_path, None)
        asking.connect(str(tmp_path / SOCKET_NAME))
        asking.sendall(said)
        for _ in range(2):
            for key, mask in selector.select(1):
                key.data(key.fileobj, mask)
        channel.close()
        assert not selector.get_map()
        asking.settimeout(30)
        assert asking.recv(1) == b""
        for name, *what in events.told:
            assert name == "inspected"
            what[1]("an answer that comes too late")
    assert len(events.told) == (1 if said else 0)


def test_an_error_of_the_launcher_at_a_connection_is_not_taken_for_a_stranger(opened, tmp_path):
    channel, events, turn = opened

    def connected(peer):
        raise ValueError("the programs cannot be started")

    events.connected = connected
    with socket.socket(socket.AF_UNIX) as wrapped:
        wrapped.connect(str(tmp_path / "control"))
        hello = json.dumps({**HELLO, "token": channel.token}).encode()
        wrapped.sendall(control_protocol.pack(control_protocol.HELLO, hello))
        with pytest.raises(ValueError, match="cannot be started"):
            wait_until(lambda: turn() or channel.is_complete)
