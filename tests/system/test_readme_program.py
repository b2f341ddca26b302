"""The programs that the README shows run as they are pasted, under the launcher and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
_LOSS = re.compile(r"epoch (\d+), instance (\d+): loss (\d\.\d+)")


def block(heading):
    """Return the first program below a heading."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    return _BLOCK.search(section)[1]


@pytest.fixture
def program(script):
    """Write the program as it is pasted, with three epochs instead of ten."""
    text = block("Your program")
    assert text.count("in range(10):") == 1
    return script(text.replace("in range(10):", "in range(3):"), "train.py")


def losses(stdout):
    """Return the printed loss of each epoch, by instance."""
    found = {}
    for epoch, instance, loss in _LOSS.findall(stdout):
        found.setdefault(int(instance), {})[int(epoch)] = float(loss)
    return found


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_under_the_launcher(poprun, warm, program):
    done = poprun("--num-instances", 2, "--num-replicas", 8, *warm, program, timeout=250)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert sorted(found) == [0, 1]
    for by_epoch in found.values():
        assert sorted(by_epoch) == [0, 1, 2]
        assert by_epoch[2] < by_epoch[0], "it learns"
    # Nobody gave a seed: the instances agree on one, and instance 0 says which.
    assert done.stderr.count("shuffle without randomSeed: the instances share the seed") == 1


def run_alone(program, folder):
    return subprocess.run(
        [sys.executable, program], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.examples
@pytest.mark.timeout(300)
def test_alone(program, tmp_path):
    done = run_alone(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(done.stdout)) == [0]
    assert "warning" not in done.stderr


@pytest.mark.examples
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_function_from_python(script, tmp_path):
    shown = block("From Python")
    done = run_alone(script(shown, "squares.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == re.search(r"# (\[.*\])", shown)[1]
