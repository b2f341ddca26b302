"""Real jobs of ``poprun-py`` in tests: their surroundings, their processes and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.repository import ROOT

__all__ = ["LEASES", "remove_surroundings", "running_jobs", "survivors", "wait_until"]

_PREFIXES = (
    "POPDIST_",
    "POPRUN_",
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "SLURM_",
    "POPLAR_",
    "IPUOF_",
    "POPTORCH_",
    "TORCHELASTIC_",
)
LEASES = "POPRUN_LEASES"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_NAME", "ROLE_RANK",
          "ROLE_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NO_COLOR",
          # That of the workers of the tests, to which older progress bars would keep.
          "COLUMNS", "LINES")  # fmt: skip


def remove_surroundings(monkeypatch):
    for name in list(os.environ):
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != LEASES:
            monkeypatch.delenv(name)


def survivors(marker: str) -> list[int]:
    """Return the pids of living processes whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in (b"Z", b"X") and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition, limit: float = 30.0, message: str = "the condition did not come true"):
    """Poll ``condition`` until it holds; fail after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{message} within {limit} s")
        time.sleep(0.01)


@contextlib.contextmanager
def running_jobs(folder):
    """Give a function that runs ``poprun-py``; afterwards no process of its jobs may be left.

    Call it with the words of the command line; ``start=True`` returns the running process.
    ``through`` is a command that starts the launcher, ``python`` the Python that runs it.
    """
    marker = f"TEST_MARK_OF_POPRUN={os.getpid()}-{time.monotonic_ns()}"
    started: list[subprocess.Popen] = []

    def call(
        *words, timeout=100, env=None, cwd=None, start=False, stdin=subprocess.DEVNULL,
        through=(), python=sys.executable,
    ):  # fmt: skip
        name, _, value = marker.partition("=")
        process = subprocess.Popen(
            [*map(str, through), str(python), "-m", "poprun_py", *map(str, words)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), name: value, **(env or {})},
            cwd=cwd or folder,
        )
        started.append(process)
        if start:
            return process
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            stdout, stderr = process.communicate(timeout=20)
            pytest.fail(f"poprun-py {words} ran over {timeout} s\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    call.marker = marker
    call.survivors = lambda: survivors(marker)
    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    deadline = time.monotonic() + 10
    while (left := survivors(marker)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {left} outlived their job"
