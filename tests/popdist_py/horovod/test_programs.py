"""Tests of programs that import Horovod, PopDist and PopTorch by the names of the SDK."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.sweep, pytest.mark.timeout(200)]
FOLDER = Path(__file__).parent


def run(poprun, instances, program, *words):
    done = poprun(
        "-n", instances, "--num-replicas", instances, "--oversubscribe", "--output", "plain",
        FOLDER / program, *words, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_mnist_trains_the_same_on_any_number_of_ranks(poprun):
    alone = run(poprun, 1, "mnist_program.py")
    assert "Accuracy: 100.00%" in alone
    assert run(poprun, 3, "mnist_program.py", "--gradient-predivide-factor", "3") == alone


@pytest.mark.long
def test_mnist_learns_with_gradients_of_16_bits(poprun):
    assert "Accuracy: 100.00%" in run(poprun, 2, "mnist_program.py", "--fp16-allreduce")


@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.long), 2])
def test_horovod_beside_popdist(poprun, instances):
    said = run(poprun, instances, "popdist_program.py")
    assert said.splitlines() == [f"seed 1234, {instances} instances on 1 host"] * instances
