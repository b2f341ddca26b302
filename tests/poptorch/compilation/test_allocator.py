"""The C library's settings after compiling: memory of a step is there for the next."""

from __future__ import annotations

import subprocess
import sys


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
