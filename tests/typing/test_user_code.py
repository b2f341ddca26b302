"""What type checkers make of a user's program: user_code.py says it line by line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

HERE = Path(__file__).parent


def checked(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_reads_a_users_program_as_it_says():
    # pyright with a JavaScript engine in its wheel: nothing is fetched when it runs.
    assert importlib.util.find_spec("basedpyright"), "pip install -e '.[test]'"
    checked("basedpyright", "--project", str(HERE), "--pythonpath", sys.executable)


@pytest.mark.sweep
def test_mypy_reads_a_users_program_as_it_says():
    # With the cache of `make check`; without one it takes a quarter of a minute.
    checked("mypy", str(HERE / "user_code.py"))
