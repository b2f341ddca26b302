"""The places for files from programs, and files that other hosts send."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from popdist_py.environment import INSTANCE_VARIABLES
from poprun_py.instance import control_protocol
from poprun_py.instance import transferred_files as sender
from poprun_py.running.supervise.job_description import JobFiles, place_of_run, place_of_spans
from poprun_py.running.supervise.other_hosts import ReceivedFiles

OTHERS = frozenset({1})


@pytest.fixture
def places(tmp_path):
    (tmp_path / "spans").mkdir()
    return place_of_run(tmp_path), place_of_spans(tmp_path / "spans", 1 << 18)


@pytest.fixture
def files(places):
    return ReceivedFiles(places, OTHERS)


def written(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def settings(places):
    return JobFiles(places=places).settings(1, is_other=True)


def test_only_an_instance_on_this_host_gets_the_paths_of_the_places(places, tmp_path):
    files = JobFiles(places=places)
    assert files.variables(0) == {
        "POPDIST_RUN_FILES": f"{tmp_path}/instance-0",
        "POPDIST_TIMELINE": f"{1 << 18}:{tmp_path}/spans/instance-0",
    }
    assert files.settings(0, is_other=False) == {"spans": f"{tmp_path}/spans/instance-0"}
    assert settings(places) == {
        "files": {"POPDIST_RUN_FILES": "", "POPDIST_TIMELINE": f"{1 << 18}:"},
        "spans": "",
    }
    assert JobFiles(places=(place_of_run(tmp_path),)).settings(0, is_other=False) == {}
    nothing = JobFiles()
    assert (nothing.variables(0), nothing.settings(1, is_other=True)) == ({}, {})


def test_paths_stay_valid_if_a_program_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = JobFiles(places=(place_of_run(Path("runs/latest")),)).variables(3)
    assert told == {"POPDIST_RUN_FILES": f"{tmp_path}/runs/latest/instance-3"}


def test_another_job_inherits_none_of_the_places(places):
    assert {each.variable for each in places} <= INSTANCE_VARIABLES


def test_files_of_another_host_arrive_whole(places, files, tmp_path, monkeypatch):
    """The wrapper sends each file in parts and removes it."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("TMPDIR", str(there))
    sent = sender.SentFiles()
    told = sent.variables(settings(places)["files"])
    size, _, prefix = told["POPDIST_TIMELINE"].partition(":")
    assert (size, prefix) == (str(1 << 18), told["POPDIST_RUN_FILES"])
    assert Path(prefix).parent.stat().st_mode & 0o777 == 0o700
    content = {
        "instance-1.values.jsonl": b'{"step": 1}\n' * 100_000,
        "instance-1.device.json": b"{}",
        "spans/instance-1.0.spans": bytes(1 << 20) + b"end",
        "spans/instance-1.torch-7-0.json": b"{}",
    }
    for name, data in content.items():
        Path(f"{prefix}.{name.partition('instance-1.')[2]}").write_bytes(data)
    sender.write_end_time(sent.prefix)
    frames = []
    frames.extend(sent.parts())
    assert list(there.iterdir()) == []
    assert len(frames) == 3 + 1 + 3 + 1 + 1
    for frame in frames:
        assert len(frame) < control_protocol.MAX_PAYLOAD
        files.take(1, frame)
    found = written(tmp_path)
    assert 0 < int(found.pop("spans/instance-1.ended")) <= time.monotonic_ns()
    assert found == content
    for name in content:
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_host_without_a_temporary_folder_sends_no_files(places, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    sent = sender.SentFiles()
    assert (sent.variables(settings(places)["files"]), sent.prefix) == ({}, "")
    assert list(sent.parts()) == []
    sent.remove()


def test_a_program_may_remove_the_folder_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sent = sender.SentFiles()
    Path(sent.prefix).parent.rmdir()
    assert list(sent.parts()) == []


def test_a_relative_temporary_folder_stays_valid(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", ".")
    sent = sender.SentFiles()
    assert sent.variables(settings(places)["files"])["POPDIST_RUN_FILES"].startswith(
        f"{tmp_path}/poprun-files-"
    )
    sent.remove()


@pytest.mark.parametrize(
    ("instance", "payload"),
    [
        (0, b"0.spans\0" + zlib.compress(b"a")),  # an instance on this host writes its own files
        (0, b"values.jsonl\0" + zlib.compress(b"a")),
        (1, b"../../0.spans\0" + zlib.compress(b"a")),
        (1, b"../report.json\0" + zlib.compress(b"a")),
        (1, b"stdout\0" + zlib.compress(b"a")),
        (1, b"values.jsonl/x\0" + zlib.compress(b"a")),
        (1, b"clock\0" + zlib.compress(b"[]")),
        (1, b"0.spans\0no compressed part"),
        (1, b""),
    ],
)
def test_other_files_and_invalid_parts_are_dropped(files, tmp_path, instance, payload):
    files.take(instance, payload)
    assert written(tmp_path) == {}


def test_without_a_run_folder_there_are_no_values(places, tmp_path):
    files = ReceivedFiles(places[1:], OTHERS)
    files.take(1, b"values.jsonl\0" + zlib.compress(b"a"))
    assert written(tmp_path) == {}


@pytest.mark.parametrize(("place", "name"), [(0, "values.jsonl"), (1, "0.spans")])
def test_a_host_cannot_fill_the_disk(places, tmp_path, place, name):
    small = replace(places[place], most_bytes=2 << 20)
    files = ReceivedFiles((small,), OTHERS)
    for _ in range(5):
        files.take(1, name.encode() + b"\0" + zlib.compress(bytes(1 << 20), 9))
    assert (small.folder / f"instance-1.{name}").stat().st_size == 2 << 20
    # These are the default limits of an instance.
    assert places[0].most_bytes == 128 << 20
    assert places[1].most_bytes == 8 << 18


def test_a_full_disk_raises_no_error(files, tmp_path):
    (tmp_path / "instance-1.values.jsonl").symlink_to("/dev/full")
    files.take(1, b"values.jsonl\0" + zlib.compress(b"a"))
