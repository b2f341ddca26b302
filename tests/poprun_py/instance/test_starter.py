"""The starter and the keepers of a wrapper: who stays, who ends, and who connects again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from support.wrapper import START, frames

from poprun_py.instance import control_protocol
from poprun_py.instance.starter import NUM_KEEPERS


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        listening.settimeout(30)
        yield listening


@pytest.fixture
def starter(listener, tmp_path):
    variables = {
        "POPRUN_CONTROL": f"unix:{tmp_path}/control", "RANK": "1", "POPRUN_TOKEN": "secret",
        "POPDIST_MEMORY_CHECKPOINTS": "1",
    }  # fmt: skip
    command = [sys.executable, "-I", "-S", START, "--", "sleep", "0"]
    with subprocess.Popen(command, env={**os.environ, **variables}) as process:
        yield process
        listener.close()  # without a launcher, keepers end
        process.kill()


def connected(listener):
    """Return the next connection, and the content of its first frame."""
    channel = listener.accept()[0]
    channel.settimeout(30)
    received = frames(channel)
    kind, payload = next(received)
    assert kind == control_protocol.HELLO
    return channel, received, json.loads(payload)


def run_program(channel, received):
    channel.sendall(control_protocol.pack(control_protocol.GO, b'{"variables": {}}'))
    while next(received)[0] != control_protocol.INSTANCE_ENDED:
        pass
    channel.sendall(control_protocol.pack(control_protocol.BYE, b"false"))


def test_no_keeper_connects_after_the_end_of_the_wrapper(listener, starter):
    channel, received, hello = connected(listener)
    assert (hello["rank"], hello["again"]) == (1, False)
    assert hello["pid"] != starter.pid
    with channel:
        run_program(channel, received)
        assert starter.wait(30) == 0
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_the_starter_ends_with_the_last_keeper(listener, starter):
    before = None
    for _ in range(NUM_KEEPERS + 1):
        channel, received, hello = connected(listener)
        assert (hello["rank"], hello["token"]) == (1, "secret")
        assert hello["again"] is (before is not None)
        before = hello["pid"]
        os.kill(before, signal.SIGKILL)
        assert list(received) == []
        channel.close()
    assert starter.wait(30) == 0


def test_the_wrapper_goes_on_without_its_starter(listener, starter):
    channel, received, _ = connected(listener)
    starter.kill()
    starter.wait(30)
    with channel:
        run_program(channel, received)
        assert list(received) == []
