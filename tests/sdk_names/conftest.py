"""The SDK's names in this process, and Pythons that are started with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from sdk_names.places import NAMES, forgotten
from support.repository import ROOT
from support.surroundings import new_environment


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


@pytest.fixture(scope="module")
def python_with_names(tmp_path_factory):
    """Copy the library into a new environment; return its Python and site-packages.

    ``tests/system`` installs a wheel, and checks that it holds the same files.
    """
    folder = tmp_path_factory.mktemp("environment") / "installed"
    python = new_environment(folder)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "popdist_py", Path(site, "popdist_py"), ignore=without)
    shutil.copy(ROOT / "popdist_torchvision_hook.py", site)
    return python, site
