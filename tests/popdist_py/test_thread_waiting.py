"""Waiting OpenMP threads sleep after a millisecond, unless the user sets how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.repository import ROOT

from popdist_py.start_hook import popdist_thread_waiting

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHOW = f"import os; print([os.environ.get(name) for name in {NAMES}])"
CASES = [
    ({}, [popdist_thread_waiting.SPIN_COUNT, None]),
    ({"GOMP_SPINCOUNT": "5"}, ["5", None]),
    ({"OMP_WAIT_POLICY": "active"}, [None, "active"]),
]


@pytest.mark.parametrize(("own", "expected"), CASES)
def test_programs_of_the_module_popdist_py_get_a_spin_count(own, expected, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHOW)
    assert _run("-m", "popdist_py", str(program), **own) == f"{expected}\n"


def test_the_poptorch_api_sets_it_before_it_imports_torch(tmp_path):
    # This stand-in for torch ends the program, so that the test does not import the real one.
    (tmp_path / "torch.py").write_text(f"{SHOW}\nraise SystemExit\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import popdist_py.poptorch"
    assert _run("-c", code) == f"{CASES[0][1]}\n"


def _run(*words: str, **own: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    return subprocess.run(
        [sys.executable, *words], check=True, text=True, stdout=subprocess.PIPE,
        env={**environ, "PYTHONPATH": str(ROOT), **own},
    ).stdout  # fmt: skip


@pytest.mark.parametrize("program", ["hands_on/main.py", "cnns/train.py"])
def test_examples_that_train_long_set_it_before_they_import_torch(program, tmp_path):
    (tmp_path / "torch.py").write_text(f"{SHOW}\nraise SystemExit\n")
    path = str(ROOT / "examples" / program)
    code = f"""
import runpy, sys
sys.path.insert(0, {str(tmp_path)!r})
runpy.run_path({path!r}, run_name="example")
"""
    assert _run("-c", code) == f"{CASES[0][1]}\n"
