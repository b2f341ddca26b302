"""Who may import whom: the contracts in setup.cfg, and what a fresh interpreter holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def test_import_contracts_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def imports_of(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return set(done.stdout.split("\n")[-2].split())


HEAVY = {"torch", "numpy", "mpi4py", "torchvision", "asyncio", "rich"}


@pytest.mark.parametrize(
    "module",
    ["cli", "launcher", "supervision.supervisor", "planning.launch_plan", "views.topology_text"],
)
def test_launcher_imports_nothing_heavy(module):
    assert not imports_of(f"import poprun_py.{module}") & HEAVY


def test_planning_and_running_import_nothing_heavy():
    code = (
        "from poprun_py.cli import run\n"
        "words = '--num-instances 2 --num-replicas 2 --print-topology tree true'.split()\n"
        "assert run(words) == 0"
    )
    assert not imports_of(code) & (HEAVY - {"rich"})


def test_library_imports_nothing_heavy():
    assert not imports_of("import popdist_py") & {"torch", "numpy", "mpi4py", "poprun_py"}
