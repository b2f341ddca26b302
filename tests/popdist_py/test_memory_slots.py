"""States in memory: complete or absent after a kill, refused if damaged, and bounded."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popdist_py import memory_slots
from popdist_py.memory_slots import MemorySlots, slots_folder
from popdist_py.own_files.owner import NotOwnFileError
from popdist_py.slot_files import sequence_of
from poprun_py.instance.job_folders import folder_name, remove_abandoned

# The program writes states whose bytes all follow from the step.
_WRITER = """
import sys
from pathlib import Path
import numpy as np
from popdist_py.memory_slots import MemorySlots
slots, step = MemorySlots(Path(sys.argv[1])), int(sys.argv[2])
while True:
    step += 1
    arrays = [np.full(size, step % 251, np.uint8) for size in (1 << 20, 13, 0, 700_001)]
    slots.write(step, b"head %d" % step, arrays)
    print(step, flush=True)
"""


def states(folder):
    return MemorySlots(folder).newest()


def test_the_newest_of_two_states_is_returned(tmp_path):
    folder = tmp_path / "job" / "slots"
    assert states(folder) is None
    slots = MemorySlots(folder)
    for step in (3, 4, 9, 2):
        assert slots.write(
            step, b"h%d" % step, [np.full(100, step, np.uint8), np.empty(0, np.uint8)]
        )
        found = states(folder)
        assert (found.step, found.head) == (step, b"h%d" % step)
        assert [array.tolist() for array in found.arrays] == [[step] * 100, []]
    assert sorted(path.name for path in folder.iterdir()) == ["slot-0", "slot-1"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
    slots.remove()
    assert not folder.exists()


def test_states_may_grow_and_shrink(tmp_path):
    slots = MemorySlots(tmp_path / "slots")
    for step, size in enumerate((10, 1 << 20, 5, 3 << 20, 0)):
        slots.write(step, b"", [np.full(size, step, np.uint8)])
        found = states(tmp_path / "slots")
        assert found.step == step
        assert np.array_equal(found.arrays[0], np.full(size, step, np.uint8))


def test_changed_arrays_leave_the_state_before(tmp_path):
    slots = MemorySlots(tmp_path / "slots")
    array = np.ones(1000, np.uint8)
    assert slots.write(1, b"", [array])
    assert not slots.write(2, b"", [array], lambda: False)
    assert states(tmp_path / "slots").step == 1
    assert slots.write(3, b"", [array])
    assert states(tmp_path / "slots").step == 3


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), data=st.data())
def test_a_changed_bit_is_refused(tmp_path_factory, place, bit, data):
    folder = tmp_path_factory.mktemp("slots")
    slots = MemorySlots(folder)
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    arrays = [random.integers(0, 256, size, np.uint8) for size in (5000, 3, 64, 300_000)]
    slots.write(1, b"before", arrays[:1])
    slots.write(2, b"head", arrays)
    path = folder / "slot-0"
    if sequence_of(folder, 0) < sequence_of(folder, 1):
        path = folder / "slot-1"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    found = states(folder)
    # A changed bit between two arrays, or in the sequence number, does not change the state.
    assert found.step in (1, 2)
    if found.step == 2:
        assert found.head == b"head"
        assert all(map(np.array_equal, found.arrays, arrays))


@pytest.mark.parametrize("length", [0, 7, 127, 4095, 4096, 4100, 4106, 4200, 9000])
def test_a_short_file_is_refused(tmp_path, length):
    slots = MemorySlots(tmp_path)
    slots.write(1, b"head", [np.ones(5000, np.uint8)])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    assert states(tmp_path) is None


def test_a_kill_at_any_moment_leaves_a_complete_state(tmp_path):
    """After each kill -9, the newest state is the last reported one or the one after it."""
    random = np.random.default_rng(int.from_bytes(os.urandom(4)))
    step = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path / "slots"), str(step)],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip
        writer.stdout.readline()
        time.sleep(random.uniform(0, 0.02))
        writer.send_signal(signal.SIGKILL)
        reported = [int(line) for line in writer.stdout.read().split()]
        writer.stdout.close()
        writer.wait()
        found = states(tmp_path / "slots")
        last = reported[-1] if reported else step + 1
        assert found.step in (last, last + 1)
        assert found.head == b"head %d" % found.step
        assert [len(array) for array in found.arrays] == [1 << 20, 13, 0, 700_001]
        assert all((array == found.step % 251).all() for array in found.arrays)
        step = found.step


def parts_of(folder, number):
    return [MemorySlots(folder, None, part, number) for part in range(number)]


def shared_arrays(step, sizes):
    return [np.random.default_rng(step).integers(0, 256, size, np.uint8) for size in sizes]


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(1, 7),
    sizes=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=5).filter(any),
    order=st.randoms(use_true_random=False),
)
def test_processes_write_a_state_together(tmp_path_factory, number, sizes, order):
    folder = tmp_path_factory.mktemp("slots")
    parts = parts_of(folder, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
        for step in (1, 2, 3):
            shared = shared_arrays(step, sizes)
            others = [np.full(step * 1000, step, np.uint8)]
            for index in order.sample(range(number), number):
                before = states(folder)
                arrays = shared + others if index == 0 else shared
                assert parts[index].write(step, b"h" * step, arrays, num_shared=len(shared))
                # A state is complete after its last part.
                assert (before.step if before else 0) == step - 1
            found = states(folder)
            assert (found.step, found.head) == (step, b"h" * step)
            assert all(map(np.array_equal, found.arrays, shared + others))


def test_a_part_that_failed_leaves_the_state_before(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
    first, second = parts_of(tmp_path, 2)

    def write(step, is_valid):
        arrays = shared_arrays(step, (5000, 70))
        first.write(step, b"", arrays, num_shared=2)
        second.write(step, b"", arrays, lambda: is_valid, num_shared=2)
        return states(tmp_path).step

    assert [write(step, step not in (3, 4)) for step in range(1, 7)] == [1, 2, 2, 2, 5, 6]


def test_parts_of_an_earlier_attempt_do_not_become_parts_of_a_new_state(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
    for attempt in (1, 2):
        first, second = parts_of(tmp_path, 2)
        found = [part.newest() for part in (first, second)]
        first.discard_others()
        if attempt == 1:
            for each in (first, second):
                each.write(1, b"", shared_arrays(1, (5000,)), num_shared=1)
        else:
            assert [each.step for each in found] == [1, 1]
        (second if attempt == 1 else first).write(
            2, b"", shared_arrays(attempt, (5000,)), num_shared=1
        )
    assert states(tmp_path).step == 1


def test_parts_that_are_written_at_the_same_time_are_one_state(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
    first, second = parts_of(tmp_path, 2)
    for step in (1, 2, 3):
        arrays = shared_arrays(step, (5000, 70))
        outer, inner = (first, second) if step % 2 else (second, first)
        write_inner = functools.partial(inner.write, step, b"", arrays, num_shared=2)
        assert outer.write(step, b"", arrays, write_inner, num_shared=2)
        found = states(tmp_path)
        assert found.step == step
        assert all(map(np.array_equal, found.arrays, arrays))


@pytest.mark.parametrize("removed", [["slot-0"], ["slot-1"], ["slot-0", "slot-1"]])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_all_parts_are_written_to_a_file_that_was_made_again(tmp_path, monkeypatch, removed, steps):
    monkeypatch.setattr(memory_slots, "_DIVIDED_BYTES", 1)
    parts = parts_of(tmp_path, 2)

    def write(step):
        for each in parts:
            each.write(step, b"", shared_arrays(step, (5000,)), num_shared=1)

    for step in range(steps):
        write(step)
    for name in removed:
        (tmp_path / name).unlink(missing_ok=True)
    for step in (8, 9):
        write(step)
        assert states(tmp_path).step == step


def test_small_arrays_are_not_divided(tmp_path):
    first, second = parts_of(tmp_path, 2)
    arrays = shared_arrays(1, (5000,))
    assert second.write(1, b"", arrays, num_shared=1)
    assert states(tmp_path) is None
    # The first process alone completes a state.
    for step in (1, 2):
        first.write(step, b"", arrays, num_shared=1)
        assert states(tmp_path).step == step


def test_a_restarted_writer_keeps_the_state_that_it_loaded(tmp_path):
    slots = MemorySlots(tmp_path)
    for step in (1, 2):
        slots.write(step, b"", [np.full(5000, step, np.uint8)])
    newest = max(tmp_path.iterdir(), key=lambda path: path.read_bytes()[:8])
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    again = MemorySlots(tmp_path)
    assert again.newest().step == 1
    again.discard_others()
    again.write(2, b"", [np.full(5000, 7, np.uint8)], lambda: False)
    assert states(tmp_path).step == 1


def test_folders_of_others_are_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(NotOwnFileError):
        MemorySlots(tmp_path / "slots").write(1, b"", [])
    tmp_path.chmod(0o700)


def test_each_folder_on_disk_has_its_own_slots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert slots_folder("/m", "a") == slots_folder("/m", tmp_path / "a")
    assert slots_folder("/m", "a") != slots_folder("/m", "b")


def test_the_next_job_does_not_remove_the_folder_of_a_running_program(tmp_path):
    job = tmp_path / folder_name("states")
    slots = MemorySlots(job / "one")
    assert slots.write(1, b"", [])
    os.utime(job, (0, 0))
    remove_abandoned([str(tmp_path)])
    assert slots.newest().step == 1
    slots.remove()
    os.utime(job, (0, 0))
    remove_abandoned([str(tmp_path)])
    assert not job.exists()


def test_states_are_written_again_after_their_folder_was_removed(tmp_path):
    folder = tmp_path / "job" / "slots"
    slots = MemorySlots(folder)
    slots.write(1, b"one", [])
    shutil.rmtree(tmp_path / "job")
    slots.write(2, b"two", [])
    assert states(folder).head == b"two"
