"""The copies of states from memory to the disk at the end of a job."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from support.launcher.consoles import KeptConsole

from popdist_py.checkpoint import Checkpoints
from popdist_py.memory_slots import MemorySlots, slots_folder
from poprun_py.instance.job_folders import CheckpointMemory
from poprun_py.launching.saved_states import SavedStates
from poprun_py.running.supervise.launch_result import LaunchResult


@pytest.mark.parametrize(
    ("code", "exit_code", "steps"),
    [
        (0, 0, []),  # the training has ended
        (7, 7, [5]),
        (128 + signal.SIGINT, 130, [5]),
        (128 + signal.SIGTERM, 75, [5]),
        (75, 75, [5]),  # the program may save its state to the disk after other steps only
    ],
)
def test_states_are_copied_unless_the_training_has_ended(tmp_path, code, exit_code, steps):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    MemorySlots(slots_folder(str(memory), disk), disk).write(5, b"head", [np.zeros(9, np.uint8)])
    console = KeptConsole()
    saved = SavedStates(CheckpointMemory(str(memory)), console)
    assert saved.finish(LaunchResult(exit_code=code)).exit_code == exit_code
    assert Checkpoints(disk).steps() == steps
    assert console.said == []
