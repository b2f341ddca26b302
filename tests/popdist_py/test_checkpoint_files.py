"""Checkpoint files are complete or absent after any failure of the writer or of the disk."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.damage import damaged
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.checkpoint import Checkpoint, Checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_latest_is_what_was_saved_last(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.latest() is None
    for step in (0, 5, 10):
        checkpoints.save(step, f"state {step}".encode())
    found = checkpoints.latest()
    assert (found.step, found.data) == (10, b"state 10")


def test_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        checkpoints.save(step, b"")
    assert names(tmp_path) == ["step-000000000003.checkpoint", "step-000000000004.checkpoint"]


def test_all_that_are_whole_are_read_newest_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    assert list(checkpoints.newest_first()) == []
    for step in (1, 2, 3):
        path = checkpoints.save(step, str(step).encode())
    path.write_bytes(path.read_bytes()[:-1])
    assert checkpoints.steps() == [3, 2, 1]
    found = [(each.step, each.data) for each in checkpoints.newest_first()]
    assert found == [(2, b"2"), (1, b"1")]


def test_same_step_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, b"old")
    checkpoints.save(3, b"new")
    assert checkpoints.latest().data == b"new"
    assert len(names(tmp_path)) == 1


def test_more_than_a_million_million_steps_sort_as_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (999_999_999_999, 1_000_000_000_000):
        checkpoints.save(step, str(step).encode())
    assert checkpoints.latest().step == 1_000_000_000_000


@given(data=st.binary(max_size=200), where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_damaged_file_is_never_loaded(tmp_path, data, where, bit):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, b"good")
    path = checkpoints.save(2, data)
    whole = bytearray(path.read_bytes())
    whole[where % len(whole)] ^= 1 << bit
    path.write_bytes(whole)
    assert checkpoints.latest().step == 1


@given(data=st.binary(max_size=200), lost=st.integers(1, 10_000))
def test_torn_file_is_never_loaded(tmp_path, data, lost):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, b"good")
    path = checkpoints.save(2, data)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - lost)])
    assert checkpoints.latest().step == 1


def test_file_of_another_step_is_not_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, b"one").rename(tmp_path / "step-000000000009.checkpoint")
    assert checkpoints.latest() is None


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    Checkpoints(tmp_path, keep=1).save(1, b"")
    assert "notes.txt" in names(tmp_path)


def test_saved_checkpoint_stays_below_damaged_ones_of_later_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (100, 200, 300):
        path = checkpoints.save(step, b"lost")
        path.write_bytes(path.read_bytes()[:-1])
    for step in (10, 20, 30):
        checkpoints.save(step, b"new")
    assert checkpoints.latest().step == 30
    assert [name for name in names(tmp_path) if int(name[5:17]) < 100] == [
        "step-000000000020.checkpoint",
        "step-000000000030.checkpoint",
    ]


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_step_that_is_no_whole_number_is_refused(tmp_path, step):
    with pytest.raises(TypeError, match=r"step=.*: expected an integer"):
        Checkpoints(tmp_path).save(step, b"")


def test_truth_value_is_the_number_that_it_is(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(True, b"first")
    assert checkpoints.latest().data == b"first"


def test_checkpoint_that_must_not_be_read_is_not_passed_over(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, b"older")
    newer = checkpoints.save(2, b"newer")
    read = Path.read_bytes

    def refuse(path):
        if path == newer:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read everything
    with pytest.raises(PermissionError):
        checkpoints.latest()


def test_what_cannot_be_removed_ends_nothing(tmp_path):
    for name in (".step-1.partial", "step-000000000001.checkpoint"):
        (tmp_path / name / "inside").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, b"saved")
    assert checkpoints.latest().step == 2


def test_two_writers_in_one_folder_are_told(tmp_path, monkeypatch):
    other = Checkpoints(tmp_path)
    sync = os.fsync

    def interfere(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        for partial in tmp_path.glob(".*.partial"):
            partial.unlink()  # as a save of the other does
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interfere)
    with pytest.raises(FileNotFoundError, match="another job saves to"):
        Checkpoints(tmp_path).save(1, b"one")
    other.save(1, b"two")
    assert other.latest().data == b"two"


def test_failed_save_leaves_the_older_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, b"good")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(2, b"never")
    assert names(tmp_path) == ["step-000000000001.checkpoint"]


@pytest.mark.parametrize("keep", [0, -1])
def test_nothing_to_keep_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=keep)


def test_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="step=-1"):
        Checkpoints(tmp_path).save(-1, b"")


WRITER = """
import sys
from popdist_py.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
found = checkpoints.latest()
step = found.step if found else 0
print("go", flush=True)
while True:
    step += 1
    checkpoints.save(step, bytes([step % 256]) * 2_000_000)
"""


def test_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    dice, last, seconds = random.Random(4), 0, 0.0
    for turn in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        ) as writer:
            assert writer.stdout.readline() == b"go\n"
            if turn == 0:
                began = time.monotonic()
                wait_until(lambda: Checkpoints(tmp_path).latest() is not None, 40)
                seconds = time.monotonic() - began
            # While a file is written, whatever this disk needs for one.
            time.sleep(dice.uniform(0, 2 * seconds))
            writer.send_signal(signal.SIGKILL)
        found = Checkpoints(tmp_path).latest()
        assert found.step >= last
        assert found.data == bytes([found.step % 256]) * 2_000_000
        last = found.step


def test_a_file_that_is_damaged_anywhere_is_never_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, b"good")
    path = checkpoints.save(2, b"a training")
    for how, data in damaged(path.read_bytes()):
        path.write_bytes(data)
        assert checkpoints.latest() == Checkpoint(1, b"good"), how


def test_a_full_disk_is_told_with_the_file_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, b"whole")

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(
        OSError, match=r"No space left on device: '.*/step-000000000002.checkpoint'"
    ):
        checkpoints.save(2, b"lost")
    assert checkpoints.latest() == Checkpoint(1, b"whole")
    assert len(list(tmp_path.iterdir())) == 1
