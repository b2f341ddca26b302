"""Python programs that run until the end of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.fixture
def program():
    """Start Python programs, which are killed at the end of the test."""
    started = []

    def start(code, **environ):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
