"""What a job costs to start and to end, beside mpirun."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from support.cpu_time import slowness
from support.repository import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(100)]
BIN = Path(sys.executable).parent
# Modules that take milliseconds to import, which no plain launch needs.
HEAVY = ("_hashlib", "click", "importlib.metadata", "jinja2", "rich", "sqlite3", "urllib.request")
LAUNCH = f"""
import sys
from poprun_py.command import cli
code = cli.run(["-n", "1", "true"])
print(code, [name for name in {HEAVY} if name in sys.modules])
"""
MPIRUN = (BIN / "mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe")


def test_a_plain_launch_imports_no_slow_modules():
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0 []\n", done.stderr


def cpu_seconds(*command):
    """Return the CPU time of a command and of the processes that it has waited for."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("count", "program", "limit"),
    # About twice the CPU time that was measured on a busy machine: 0.15 s, 0.17 s and 0.8 s.
    [(1, ("true",), 0.3), (2, ("true",), 0.35), (32, ("sleep", "0"), 1.6)],
)
def test_a_job_needs_little_more_cpu_time_than_mpirun(count, program, limit):
    ours = (BIN / "poprun-py", "-n", count, "--oversubscribe", *program)
    theirs = (*MPIRUN, "-n", count, *program)
    pairs = [(cpu_seconds(*ours), cpu_seconds(*theirs)) for _ in range(5)]
    assert statistics.median(our - their for our, their in pairs) < limit * slowness()
