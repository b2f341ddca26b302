"""A folder of leases, and processes that hold leases in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.repository import ROOT

HOLDER = Path(__file__).with_name("lease_holder.py")


@pytest.fixture
def place(tmp_path):
    """Return the path of a folder for leases, which is missing."""
    return tmp_path / "leases"


@pytest.fixture
def holder(place):
    """Start a process that holds CPUs, waits or looks; return it with the leases that it saw."""
    started = []

    def start(verb="hold", cpus="0", folder=place, through=(), user=()):
        process = subprocess.Popen(
            [*through, sys.executable, str(HOLDER), str(folder), verb, cpus, *user],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(process)
        return SimpleNamespace(process=process, seen=json.loads(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.communicate()
