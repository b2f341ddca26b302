"""The launcher's side of recording: what instances are told, other hosts' clocks and files."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import pytest

from popdist_py.timeline.folder import clock_path, end_path, instance_prefix, read_clock, read_end
from poprun_py.instance import protocol
from poprun_py.instance.timeline_files import TimelineFiles
from poprun_py.timeline.collector import Collector, Recording


@pytest.fixture
def recording(tmp_path):
    return Recording(folder=tmp_path, instance_bytes=1 << 18, others=frozenset({1}))


def test_an_instance_of_this_host_is_told_its_place_and_another_is_not(recording, tmp_path):
    collector = Collector(recording, print)
    assert collector.start_of(0) == {
        "timeline": {"bytes": 1 << 18, "prefix": str(tmp_path / "instance-0")}
    }
    assert collector.start_of(1) == {"timeline": {"bytes": 1 << 18}}
    assert Collector(None, print).start_of(0) == {}


def test_another_host_is_asked_for_its_time_at_the_start_and_at_the_end(recording):
    """Its clock is an hour ahead here; the clock of an instance of this host is ours."""
    hour, asked = 3600 * 10**9, []
    collector = Collector(recording, lambda *frame: asked.append(frame))
    for _ in range(2):
        collector.ask_time(0)
        collector.ask_time(1)
        while asked:
            instance, kind, sent = asked.pop()
            assert (instance, kind) == (1, protocol.ASK_CLOCK)
            collector.take_time(1, sent, time.monotonic_ns() + hour)
    line = read_clock(clock_path(instance_prefix(recording.folder, 1)))
    assert line.begin < line.end
    now = time.monotonic_ns()
    assert abs(line.ours(now + hour) - now) <= line.error + 1_000_000
    collector.take_time(0, 0, 0)  # nobody asked
    assert not clock_path(instance_prefix(recording.folder, 0)).exists()


def test_files_of_another_host_arrive_whole(recording, tmp_path, monkeypatch):
    """As its wrapper sends them: in parts, and removed there."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("TMPDIR", str(there))
    files = TimelineFiles({"bytes": 1 << 18})
    size, _, prefix = files.variables()["POPDIST_TIMELINE"].partition(":")
    assert size == str(1 << 18)
    content = {"0.spans": bytes(1 << 20) + b"end", "torch-7-0.json": b"{}"}
    for name, data in content.items():
        Path(f"{prefix}.{name}").write_bytes(data)
    files.program_ended()
    frames = []
    files.send(frames.append)
    assert list(there.iterdir()) == []
    assert len(frames) == 5
    collector = Collector(recording, print)
    for frame in frames:
        assert len(frame) < protocol.MAX_PAYLOAD
        collector.take_file(1, frame)
    for name, data in content.items():
        assert (tmp_path / f"instance-1.{name}").read_bytes() == data
    assert 0 < read_end(end_path(instance_prefix(tmp_path, 1))) <= time.monotonic_ns()


@pytest.mark.parametrize(
    ("instance", "payload"),
    [
        (0, b"0.spans\0" + zlib.compress(b"a")),  # of this host: it writes the file itself
        (1, b"../../0.spans\0" + zlib.compress(b"a")),
        (1, b"clock\0" + zlib.compress(b"[]")),
        (1, b"0.spans\0no compressed part"),
        (1, b""),
    ],
)
def test_what_is_no_file_of_the_instance_is_dropped(recording, tmp_path, instance, payload):
    Collector(recording, print).take_file(instance, payload)
    assert list(tmp_path.iterdir()) == []


def test_a_host_cannot_fill_the_disk(recording, tmp_path):
    part = b"0.spans\0" + zlib.compress(bytes(1 << 19))
    collector = Collector(recording, print)
    for _ in range(10):
        collector.take_file(1, part)
    assert (tmp_path / "instance-1.0.spans").stat().st_size <= 8 << 18
