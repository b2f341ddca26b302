"""Instances of one host have the weights together, and train, load and save as if each had them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("shared_weights_program.py")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("instances", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_each_instance_updates_a_slice_for_all(poprun, instances):
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe", PROGRAM,
        timeout=140,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed in") == 9
