"""Long training holds no more memory than short training."""

from __future__ import annotations

import itertools
import subprocess
import sys

import psutil
import pytest
from support.models import Mlp, classified, quiet_options
from torch.utils.data import TensorDataset

import popdist_py.poptorch as poptorch

STEPS = 10_000
# One small tensor kept per step would be some 5 MB.
ALLOWED_BYTES = 2_000_000


def by_hand(options):
    while True:
        yield classified(4)


def through_a_loader(options):
    loader = poptorch.DataLoader(options, TensorDataset(*classified(80)), batch_size=2)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def growth(execution, batches):
    """Return a wrapper that trained 10,000 steps, and the bytes that the last 9,000 added."""
    options = quiet_options().replicationFactor(2)
    options.Emulator.replicaExecution(execution)
    model = Mlp()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1e-3)
    training = poptorch.trainingModel(model, options, optimizer)
    early = 0
    for step, batch in enumerate(itertools.islice(batches(options), STEPS), start=1):
        training(*batch)
        if step == STEPS // 10:
            early = psutil.Process().memory_info().rss
    return training, psutil.Process().memory_info().rss - early


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_steps_hold_what_a_thousand_hold():
    """In a fresh interpreter: memory that other tests gave back would hide a leak."""
    program = (
        "from poptorch.execution import test_memory as test\n"
        "kept = [test.growth('auto', test.by_hand), test.growth('loop', test.through_a_loader)]\n"
        "print(*(added for _, added in kept))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_hand_added, loader_added = map(int, done.stdout.split())
    assert by_hand_added < ALLOWED_BYTES
    assert loader_added < ALLOWED_BYTES


def faults_of_large_steps(**environment):
    """Return the page faults of the last ten of forty steps that allocate and free 64 MB.

    Until freed blocks of the size asked for lie between the small ones, some of the first steps
    take new memory: how many depends on where the system put the heap.
    """
    program = (
        "import resource, torch\n"
        "from support.models import Mlp, classified, quiet_options\n"
        "import popdist_py.poptorch as poptorch\n"
        "model = Mlp()\n"
        "sgd = poptorch.optim.SGD(model.parameters(), lr=0.1)\n"
        "poptorch.trainingModel(model, quiet_options(), sgd)(*classified(4))\n"
        "for step in range(40):\n"
        "    if step == 30:\n"
        "        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(16_000_000)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return int(done.stdout)


def test_memory_of_a_step_is_there_for_the_next():
    assert faults_of_large_steps() < 1000


def test_the_users_settings_of_the_c_library_stay():
    # The number that glibc itself starts with.
    assert faults_of_large_steps(MALLOC_MMAP_MAX_="65536") > 100_000
