"""Frames that the launcher sends in parts, with other frames between them."""

from __future__ import annotations

import json
import selectors
import socket

import pytest
from support.processes import wait_until

from poprun_py.instance import control_protocol
from poprun_py.running.supervise.control_channel import ControlChannel

PART = 1 << 19


class Events:
    def connected(self, peer):
        pass

    def disconnected(self, peer):
        pass


@pytest.fixture
def channel_and_wrapper(tmp_path):
    """A channel with one wrapper, and the socket at the wrapper's end."""
    channel = ControlChannel(1, Events())
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as wrapper:
        channel.open(selector, tmp_path, None)
        wrapper.connect(str(tmp_path / "control"))
        wrapper.settimeout(60)
        hello = {"token": channel.token, "rank": 0, "pid": 1, "host": "here"}
        wrapper.sendall(control_protocol.pack(control_protocol.HELLO, json.dumps(hello).encode()))

        def turn():
            for key, events in selector.select(0.1):
                key.data(key.fileobj, events)

        wait_until(lambda: turn() or channel.is_complete)
        yield channel, wrapper, turn
        channel.close()


def frames(payloads):
    return (control_protocol.pack(control_protocol.INPUT_FILE, each) for each in payloads)


def test_parts_are_taken_as_fast_as_they_are_sent(channel_and_wrapper):
    channel, wrapper, turn = channel_and_wrapper
    taken = []

    def parts():
        for number in range(64):
            taken.append(number)
            yield bytes([number]) * PART
        yield b""

    channel.peers[0].connection.send_parts(frames(parts()))
    for _ in range(5):
        turn()
    # The wrapper does not read, so most parts are not taken yet.
    assert len(taken) < 8
    channel.send_to(0, control_protocol.STOP, 5)
    reader, received = control_protocol.Reader(), []
    while not received or received[-1] != (control_protocol.INPUT_FILE, b""):
        turn()
        received += reader.feed(wrapper.recv(1 << 20))
    given = [payload for kind, payload in received if kind == control_protocol.INPUT_FILE]
    assert given == [bytes([number]) * PART for number in range(64)] + [b""]
    # A stop does not wait for the last part.
    assert received.index((control_protocol.STOP, b"5")) < 10
    wait_until(lambda: turn() or not channel.peers[0].connection.has_parts)


def test_parts_for_a_closed_connection_are_dropped(channel_and_wrapper):
    channel, wrapper, turn = channel_and_wrapper
    channel.peers[0].connection.send_parts(frames(bytes(PART) for _ in range(64)))
    wrapper.close()
    wait_until(lambda: turn() or not channel.peers[0].connection.has_parts)
    assert not channel.peers[0].connection.is_open
