"""States in memory that are copied to the disk without the programs that wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from popdist_py import slot_files
from popdist_py.checkpoint import Checkpoints
from popdist_py.memory_slots import MemorySlots, slot_state, slots_folder


@pytest.fixture
def slots(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    return MemorySlots(slots_folder(str(memory), disk), disk)


def write(slots, step):
    slots.write(step, f"head {step}".encode(), [np.full(1000, step, np.uint8)])


def test_the_newest_state_becomes_a_checkpoint_that_holds_the_slot(slots, tmp_path):
    write(slots, 3)
    write(slots, 4)
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py.slot_files", tmp_path / "memory"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == {str(tmp_path / "disk"): 4}
    latest = Checkpoints(tmp_path / "disk").latest()
    state = slot_state(latest.data)
    assert (latest.step, state.step, state.head) == (4, 4, b"head 4")
    assert state.arrays[0].tolist() == [4] * 1000


def test_a_newer_checkpoint_of_the_program_stays_and_older_ones_are_kept(slots, tmp_path):
    files = Checkpoints(tmp_path / "disk", keep=3)
    for step in (1, 2, 5):
        files.save(step, b"saved")
    write(slots, 5)
    assert slot_files.copy_to_disk(tmp_path / "memory") == {str(tmp_path / "disk"): 5}
    assert files.latest().data == b"saved"
    write(slots, 6)
    slot_files.copy_to_disk(tmp_path / "memory")
    assert files.steps() == [6, 5, 2, 1]


def test_a_slot_that_is_being_written_is_not_copied(slots, tmp_path):
    write(slots, 3)
    slots.write(4, b"", [], lambda: False)
    assert slot_files.copy_to_disk(tmp_path / "memory") == {str(tmp_path / "disk"): 3}


def test_memory_without_a_state_or_without_a_folder_on_this_disk_gives_no_checkpoint(tmp_path):
    memory = tmp_path / "memory"
    other = MemorySlots(slots_folder(str(memory), tmp_path / "disk"))
    write(other, 3)
    assert slot_files.copy_to_disk(memory) == {}
    assert not (tmp_path / "disk").exists()
    done = subprocess.run(
        [sys.executable, "-m", "popdist_py.slot_files", tmp_path / "none"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""


def test_a_copy_leaves_the_file_that_a_program_is_writing(slots, tmp_path):
    write(slots, 3)
    partial = tmp_path / "disk" / ".step-000000000004.checkpoint.7-00.partial"
    partial.parent.mkdir()
    partial.write_bytes(b"half")
    slot_files.copy_to_disk(tmp_path / "memory")
    assert partial.exists()


def test_a_copy_is_repeated_if_a_program_removes_its_temporary_file(slots, tmp_path, monkeypatch):
    write(slots, 3)
    sync = os.fsync

    def interfere(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        for partial in (tmp_path / "disk").glob(".*.partial"):
            partial.unlink()  # as a save of the program does
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interfere)
    assert slot_files.copy_to_disk(tmp_path / "memory") == {str(tmp_path / "disk"): 3}
    assert Checkpoints(tmp_path / "disk").steps() == [3]
