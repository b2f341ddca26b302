"""The file that a program is given on another host, and large files on their way back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from support.repository import ROOT

from popdist_py.environment import CALL, CALL_FILES
from poprun_py.instance import control_protocol
from poprun_py.instance.transferred_files import ReceivedFile

MAIN = ROOT / "poprun_py" / "instance" / "start_wrapper.py"


@contextlib.contextmanager
def wrapped(tmp_path, *program, **environ):
    """Give the launcher's end of the channel of a wrapper, and the wrapper."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control"))
    listener.listen()
    wrapper = subprocess.Popen(
        [sys.executable, "-I", "-S", MAIN, "--", *program],
        env={**os.environ, "POPRUN_CONTROL": f"unix:{tmp_path}/control", "RANK": "1", **environ},
    )
    try:
        with listener.accept()[0] as channel:
            channel.settimeout(60)
            yield channel, wrapper
    finally:
        wrapper.kill()
        wrapper.wait()
        listener.close()


def frames(channel):
    reader = control_protocol.Reader()
    while data := channel.recv(1 << 16):
        yield from reader.feed(data)


def first(kind, received):
    return next(payload for each, payload in received if each == kind)


def go(**start):
    return control_protocol.pack(control_protocol.GO, json.dumps(start).encode())


def test_a_program_reads_the_file_that_was_sent_before_it(tmp_path):
    """It has no name, so that it cannot be left over; the program after it inherits nothing."""
    place = tmp_path / "there"
    place.mkdir()
    code = f"import os; print(open(os.environ['{CALL}']).read(), end='')"
    with wrapped(tmp_path, sys.executable, "-c", code, TMPDIR=str(place)) as (channel, wrapper):
        received = frames(channel)
        for part in (b"one ", b"two", b""):
            channel.sendall(control_protocol.pack(control_protocol.INPUT_FILE, part))
        answer = json.loads(first(control_protocol.INPUT_FILE, received))
        assert list(place.iterdir()) == []
        assert Path(f"/proc/{wrapper.pid}/fd", Path(answer["path"]).name).stat().st_size == 7
        channel.sendall(go(variables={CALL: answer["path"]}))
        assert first(control_protocol.STDOUT, received) == b"one two"
        channel.sendall(control_protocol.pack(control_protocol.BYE))
        assert wrapper.wait(60) == 0


def test_a_host_that_cannot_keep_the_file_says_so(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    with wrapped(tmp_path, "true", TMPDIR=nowhere) as (channel, wrapper):
        for part in (b"one", b""):
            channel.sendall(control_protocol.pack(control_protocol.INPUT_FILE, part))
        answer = json.loads(first(control_protocol.INPUT_FILE, frames(channel)))
        assert answer == {"problem": f"{nowhere}: No such file or directory"}
        channel.sendall(control_protocol.pack(control_protocol.BYE))
        assert wrapper.wait(60) == 1


def test_a_full_disk_is_the_problem_of_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = ReceivedFile()
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, file._descriptor)
    os.close(descriptor)
    file.add(b"one")
    file.add(b"two")
    assert file.answer() == {"problem": "No space left on device"}
    file.close()


@pytest.mark.sweep
def test_results_larger_than_memory_wait_on_the_disk(tmp_path):
    """A launcher that does not read: the wrapper holds no more than a few parts of 128 MB."""
    place = tmp_path / "there"
    place.mkdir()
    code = (
        "import os\n"
        f"with open(os.environ['{CALL_FILES}'] + '.result', 'wb') as file:\n"
        "    for number in range(256):\n"
        "        file.write(bytes([number]) * (1 << 19))\n"
    )
    with wrapped(tmp_path, sys.executable, "-c", code, TMPDIR=str(place)) as (channel, wrapper):
        channel.sendall(go(variables={}, files={CALL_FILES: ""}))
        received, sizes = frames(channel), []
        for kind, payload in received:
            if kind == control_protocol.FILE:
                name, _, packed = payload.partition(b"\0")
                assert name == b"result"
                part = zlib.decompress(packed)
                assert set(part) == {len(sizes)}
                sizes.append(len(part))
            if kind == control_protocol.INSTANCE_ENDED:
                break
        assert sizes == [1 << 19] * 256
        lines = Path(f"/proc/{wrapper.pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        assert peak < 40_000
        assert list(place.iterdir()) == []
        channel.sendall(control_protocol.pack(control_protocol.BYE))
        assert wrapper.wait(60) == 0
