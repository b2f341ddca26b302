"""What the C library does with freed memory: returned while compiling, kept for steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.collectives import freed_memory
from popdist_py.collectives.freed_memory import give_back_freed_memory, keep_freed_memory
from popdist_py.poptorch.execution.replica_graphs.graph_replicas import GraphReplicas

PROGRAM = Path(__file__).with_name("freed_memory_program.py")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "case",
    [
        "given_back_until_it_is_kept",
        "given_back_once",
        pytest.param("kept_after_compiling", marks=pytest.mark.sweep),
        pytest.param("kept_after_a_refusal", marks=pytest.mark.long),
    ],
)
def test_freed_memory(case):
    """In a fresh interpreter: these take it that no hole of a block's size is left."""
    if freed_memory._mallopt() is None:
        pytest.skip("another C library, or settings of the user's own")
    done = subprocess.run(
        [sys.executable, PROGRAM, case],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_python_looks_for_cycles_except_while_recording(was_enabled, fails, monkeypatch):
    seen, captured = [], GraphReplicas._function

    def capture(*args):
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("refused")
        return captured(*args)

    monkeypatch.setattr(GraphReplicas, "_function", capture)
    inference = poptorch.inferenceModel(Mlp(), quiet_options())
    try:
        (gc.enable if was_enabled else gc.disable)()
        inference.compile(classified(4)[0])
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert set(seen) == {False}


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_users_own_stay(variable, monkeypatch):
    monkeypatch.setenv(variable, "glibc.malloc.arena_max=2")
    freed_memory._mallopt.cache_clear()
    try:
        assert not give_back_freed_memory()
        assert not keep_freed_memory()
    finally:
        monkeypatch.undo()
        freed_memory._mallopt.cache_clear()
