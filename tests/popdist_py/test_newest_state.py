"""The newest state of several hosts: its own, that of another host, or the one on the disk."""

from __future__ import annotations

import threading

import pytest
import torch

from popdist_py.checkpoint import Checkpoints
from popdist_py.memory_slots import MemorySlots
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
        memory = MemoryCopies(MemorySlots(tmp_path / str(index)), 1, is_writer=True)
        found[index] = newest_state(memory, files, Peer(threads, index))

    for index, step in enumerate(steps):
        if step is not None:
            state = {"step": step, "weights": torch.full((5,), step)}
            MemoryCopies(MemorySlots(tmp_path / str(index)), 1, is_writer=True).save(step, state)
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
