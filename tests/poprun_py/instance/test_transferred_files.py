"""Files that the launcher sends to a program, and large files that a program sends back."""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path

import pytest
from support.wrapper import frames, wrapped

from popdist_py.environment import CALL, CALL_FILES
from poprun_py.instance import control_protocol
from poprun_py.instance.transferred_files import ReceivedFile


def first(kind, received):
    return next(payload for each, payload in received if each == kind)


def go(**start):
    return control_protocol.pack(control_protocol.GO, json.dumps(start).encode())


def test_a_program_reads_the_file_that_the_launcher_sent(tmp_path):
    """The file has no name, so it cannot be left behind."""
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


def test_a_host_without_a_place_for_the_file_reports_it(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    with wrapped(tmp_path, "true", TMPDIR=nowhere) as (channel, wrapper):
        for part in (b"one", b""):
            channel.sendall(control_protocol.pack(control_protocol.INPUT_FILE, part))
        answer = json.loads(first(control_protocol.INPUT_FILE, frames(channel)))
        assert answer == {"problem": f"{nowhere}: No such file or directory"}
        channel.sendall(control_protocol.pack(control_protocol.BYE))
        assert wrapper.wait(60) == 1


def test_a_full_disk_is_reported(monkeypatch, tmp_path):
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
    """While the launcher does not read, the wrapper holds only a few parts of 128 MB in memory."""
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
