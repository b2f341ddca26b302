"""Real jobs of ``poprun-py`` in tests: their surroundings, their processes and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from support.repository import ROOT

from tools.processes import LEASES, surrounding_variables, survivors, wait_until

__all__ = [
    "LEASES",
    "connections",
    "remove_surroundings",
    "running_jobs",
    "survivors",
    "wait_until",
]


def remove_surroundings(monkeypatch):
    """Remove what a surrounding job or shell may have set."""
    for name in surrounding_variables():
        monkeypatch.delenv(name)


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


def connections(kind: str = "inet") -> list[Any]:
    """Return the sockets of this kind that this process has open."""
    own = psutil.Process()
    # psutil before 6 has the older name alone.
    return (own.net_connections if hasattr(own, "net_connections") else own.connections)(kind)
