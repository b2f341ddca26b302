"""The newest state of several hosts: its own, that of another host, or the one on the disk."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from popdist_py.checkpoint import Checkpoints
from popdist_py.memory_slots import MemorySlots
from popdist_py.torch_states import memory_copies
from popdist_py.torch_states.memory_copies import MemoryCopies, newest_state, wait_for_copies


class Threads:
    """Instances that are threads of this process."""

    def __init__(self, number):
        self.values = [None] * number
        self.barrier = threading.Barrier(number)
        self.roots = []


class Peer:
    def __init__(self, threads, index):
        self.threads, self.instance_index = threads, index

    def all_gather_object(self, value, name=""):
        self.threads.values[self.instance_index] = value
        self.threads.barrier.wait(10)
        values = list(self.threads.values)
        self.threads.barrier.wait(10)
        return values

    def broadcast_object(self, value, root=0, name=""):
        if self.instance_index == 0:
            self.threads.roots.append(root)
        return self.all_gather_object(value)[root]


def found_on_hosts(tmp_path, steps, disk):
    """Return what each host finds, and the senders of all broadcasts.

    Args:
        tmp_path: The folder of all hosts.
        steps: The newest step in the memory of each host; None for an empty memory.
        disk: The step of the checkpoint on the disk, or None.
    """
    files = Checkpoints(tmp_path / "disk")
    if disk is not None:
        files.save(disk, b"from the disk")
    threads, found = Threads(len(steps)), [None] * len(steps)

    def run(index):
        memory = MemoryCopies(MemorySlots(tmp_path / str(index)), 1)
        found[index] = newest_state(memory, files, Peer(threads, index))

    for index, step in enumerate(steps):
        if step is not None:
            state = {"step": step, "weights": torch.full((5,), step)}
            MemoryCopies(MemorySlots(tmp_path / str(index)), 1).save(step, state.copy)
    wait_for_copies()
    running = [threading.Thread(target=run, args=(index,)) for index in range(len(steps))]
    for each in running:
        each.start()
    for each in running:
        each.join(20)
    return found, threads.roots


@pytest.mark.parametrize(
    ("steps", "disk", "step", "roots"),
    [
        ((7, 7, 7), None, 7, [0]),  # each host loads its own state
        ((7, 8, 7), None, 8, [0, 1]),
        ((None, None, 4), 2, 4, [0, 2]),
        ((6, None), 6, 6, [0, 0]),
        ((3, 5), 9, 9, [0]),
        ((None, None), 9, 9, [0]),
    ],
)
def test_every_host_gets_the_newest_state(tmp_path, steps, disk, step, roots):
    found, senders = found_on_hosts(tmp_path, steps, disk)
    assert senders == roots
    assert [each[0] for each in found] == [step] * len(steps)
    for _, state in found:
        if step == disk and step > max(each or 0 for each in steps):
            assert state == b"from the disk"
        else:
            assert state["step"] == step
            assert torch.equal(state["weights"], torch.full((5,), step))


def test_without_any_state_there_is_none(tmp_path):
    assert found_on_hosts(tmp_path, (None, None), None) == ([None, None], [0])


def test_a_damaged_checkpoint_on_the_disk_is_skipped(tmp_path):
    Checkpoints(tmp_path / "disk").save(9, b"whole")
    (path,) = (tmp_path / "disk").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    found, _ = found_on_hosts(tmp_path, (3, 3), None)
    assert [each[0] for each in found] == [3, 3]


def of_version_2(state):
    return state["version"] == 2


@pytest.mark.parametrize("unknown", [{"version": 3}, {"weights": 1}, b"not a state"])
def test_states_in_memory_that_cannot_be_loaded_are_left_out(tmp_path, unknown):
    files, peer = Checkpoints(tmp_path / "disk"), Peer(Threads(1), 0)
    slots = MemorySlots(tmp_path / "memory")
    memory = MemoryCopies(slots, 1)

    def save_unknown(step):
        if isinstance(unknown, bytes):
            slots.write(step, unknown, [])
        else:
            memory.save(step, lambda: unknown)
            wait_for_copies()

    memory.save(4, lambda: {"version": 2, "step": 4})
    wait_for_copies()
    save_unknown(5)
    with pytest.warns(UserWarning, match="step 5 in memory is ignored"):
        found = newest_state(memory, files, peer, of_version_2)
    assert found == (4, {"version": 2, "step": 4})
    slots.remove()
    save_unknown(5)
    files.save(3, b"from the disk")
    with pytest.warns(UserWarning, match="step 5 in memory is ignored"):
        assert newest_state(memory, files, peer, of_version_2) == (3, b"from the disk")


def test_a_copy_on_the_disk_that_cannot_be_loaded_is_returned_as_bytes(tmp_path):
    """So that its reader can say what is wrong, as with other checkpoints on the disk."""
    files = Checkpoints(tmp_path / "disk")
    slots = MemorySlots(tmp_path / "memory")
    slots.write(6, b"not a state", [])
    content = max((tmp_path / "memory").iterdir()).read_bytes()
    files.save(6, content)
    assert newest_state(None, files, Peer(Threads(1), 0)) == (6, content)


def test_a_forked_child_does_not_wait_for_copies(tmp_path):
    memory = MemoryCopies(MemorySlots(tmp_path / "memory"), 1)
    is_forked = threading.Event()
    memory._write = lambda *_: is_forked.wait(20)
    memory.save(1, dict)
    child = os.fork()
    if child == 0:
        wait_for_copies()
        os._exit(7)
    # A child that waits must not keep the output of the tests open.
    killer = threading.Timer(10, os.kill, (child, signal.SIGKILL))
    killer.start()
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        killer.cancel()
        is_forked.set()


def test_a_copy_is_waited_for_again_after_an_interruption(tmp_path, monkeypatch):
    memory = MemoryCopies(MemorySlots(tmp_path / "memory"), 1)
    may_end = threading.Event()
    memory._write = lambda *_: may_end.wait(20)
    memory.save(1, dict)
    (copy,) = memory_copies._unfinished

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupt)
        patch.setattr(threading.Event, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            wait_for_copies()
    assert copy in memory_copies._unfinished
    may_end.set()
    wait_for_copies()
    assert copy.done()
