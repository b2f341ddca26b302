"""A job that gets SIGTERM, and soon SIGKILL, loses no finished step; two seconds are enough."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from support.processes import wait_until

from popdist_py.checkpoint import Checkpoints

pytestmark = pytest.mark.mpi

# After step 5, the program makes no step until it is killed. A shell makes its process ignore
# SIGTERM.
IGNORING = ("sh", "-c", "trap '' TERM; exec \"$@\"", "sh")
PROGRAM = """
import sys, time
import torch
import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints
from popdist_py.torch_states.memory_copies import wait_for_copies

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self.layer(inputs), labels)

popdist_py.init()
torch.manual_seed(1)
options = poptorch.DistributedOptions().showCompilationProgressBar(False)
options.randomSeed(3)
net = Net()
model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
samples = [(torch.full((4,), i / 32), torch.tensor(i % 2)) for i in range(32)]
loader = poptorch.DataLoader(options, samples, batch_size=2, shuffle=True)
checkpoints = TrainingCheckpoints(sys.argv[1], model, loader, disk_every=1000)
step, _ = checkpoints.resume()
print("resumed at", step, flush=True)
for inputs, labels in checkpoints.batches():
    model(inputs, labels)
    step += 1
    checkpoints.save(step)
    if step == 5 and sys.argv[2] != "/dev/null":
        # Instance 0 writes the state to memory, and may finish the step after instance 1.
        if popdist_py.getInstanceIndex() == 0:
            wait_for_copies()
            open(sys.argv[2], "w").close()
        time.sleep(600)
"""


@pytest.fixture
def stopped(poprun, script, warm, tmp_path):
    """Start a training that stays in its sixth step; give its job, its folder and its command."""
    waits, disk = tmp_path / "waits", tmp_path / "disk"
    words = ("--num-instances", "2", "--num-replicas", "2", "--memory-checkpoints")
    command = (*words, *IGNORING, *warm, script(PROGRAM), disk)
    job = poprun("--grace", "1", *command, waits, start=True)
    wait_until(waits.exists, 60, "the training made no five steps")
    return job, Checkpoints(disk), command


def test_a_training_that_ignores_sigterm_resumes_from_its_last_step(poprun, stopped):
    job, saved, command = stopped
    job.send_signal(signal.SIGTERM)
    wait_until(saved.latest, 30, "no checkpoint")
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 75
    assert stderr == (
        "poprun-py: the job stopped at a checkpoint; run the same command again to resume the job\n"
    )
    assert saved.latest().step == 5
    again = poprun(*command, os.devnull)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("resumed at 5") == 2
    assert "separate model" not in again.stderr


@pytest.mark.parametrize("notice_seconds", [30, pytest.param(2, marks=pytest.mark.long)])
def test_processes_that_get_sigterm_and_then_sigkill_leave_their_last_step(
    poprun, stopped, notice_seconds
):
    _, saved, _ = stopped
    kill_all(poprun, signal.SIGTERM)
    wait_until(saved.latest, notice_seconds, "no checkpoint in time")
    kill_all(poprun, signal.SIGKILL)
    assert saved.latest().step == 5


def kill_all(poprun, number):
    for pid in poprun.survivors():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
