"""The SDK's names in this process, and Pythons that are started with them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sdk_names.places import NAMES, forgotten
from support.repository import ROOT


@pytest.fixture
def names(monkeypatch):
    """Let this process import the names, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(NAMES))
    with forgotten():
        yield


@pytest.fixture
def python(tmp_path):
    """Run ``python -m popdist_py`` with the words that follow; from a checkout on PYTHONPATH."""

    def run(*words, program="-m popdist_py", executable=sys.executable, cwd=None, **variables):
        return subprocess.run(
            [executable, *program.split(), *map(str, words)],
            cwd=cwd or tmp_path, capture_output=True, text=True, check=False, timeout=100,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        )  # fmt: skip

    return run
