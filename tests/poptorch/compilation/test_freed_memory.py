"""What the C library does with freed memory: returned while compiling, kept for steps."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.models import Mlp, classified, quiet_options

import popdist_py.poptorch as poptorch
from popdist_py.collectives import freed_memory
from popdist_py.collectives.freed_memory import (
    give_back_freed_memory,
    give_back_kept_memory,
    keep_freed_memory,
)
from popdist_py.poptorch.compilation.compiler import Compiler
from popdist_py.poptorch.execution.graph_replicas import GraphReplicas

BLOCK_BYTES = 32 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bytes_given_back():
    """Return how much less memory the process has once it frees a block that others follow."""
    block = np.ones(BLOCK_BYTES // 8)
    others = [np.ones(8000) for _ in range(8)]
    before = resident_bytes()
    del block
    after = resident_bytes()
    del others
    return before - after


def given_back_until_it_is_kept():
    assert give_back_freed_memory()
    assert bytes_given_back() > BLOCK_BYTES / 2
    assert keep_freed_memory()
    assert bytes_given_back() < BLOCK_BYTES / 2


def given_back_once():
    assert keep_freed_memory()
    block = np.ones(BLOCK_BYTES // 8)
    others = [np.ones(8000) for _ in range(8)]
    del block
    before = resident_bytes()
    give_back_kept_memory()
    assert before - resident_bytes() > BLOCK_BYTES / 2
    del others
    assert bytes_given_back() < BLOCK_BYTES / 2


def kept_after_compiling():
    kept_after_compiling_with(lambda original: original, nullcontext())


def kept_after_a_refusal():
    def refused(*_, **__):
        raise ValueError("refused")

    kept_after_compiling_with(lambda _: refused, pytest.raises(ValueError, match="refused"))


def kept_after_compiling_with(rest, ends):
    given_back = []
    rest = rest(Compiler.build)

    def build(compiler, *args, **kwargs):
        given_back.append(bytes_given_back())
        return rest(compiler, *args, **kwargs)

    Compiler.build = build
    model = Mlp()
    training = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    with ends:
        training.compile(*classified(4))
    assert given_back[0] > BLOCK_BYTES / 2
    assert bytes_given_back() < BLOCK_BYTES / 2


CASES = (given_back_until_it_is_kept, given_back_once, kept_after_compiling, kept_after_a_refusal)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.sweep) for case in CASES[1:])],
    ids=lambda case: case.__name__,
)
def test_freed_memory(case):
    """In a fresh interpreter: these take it that no hole of a block's size is left."""
    if freed_memory._mallopt() is None:
        pytest.skip("another C library, or settings of the user's own")
    done = subprocess.run(
        [sys.executable, __file__, case.__name__],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_python_looks_for_cycles_except_while_capturing(was_enabled, fails, monkeypatch):
    seen, captured = [], GraphReplicas._capture

    def capture(*args):
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("refused")
        return captured(*args)

    monkeypatch.setattr(GraphReplicas, "_capture", capture)
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


if __name__ == "__main__":
    globals()[sys.argv[1]]()
