"""Compressed gradients between hosts: the digits example learns what it learns without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("accuracy_program.py")


# Seeds and epochs, and the accuracy that they come to.
@pytest.mark.parametrize(
    ("seeds", "epochs", "accuracy"), [(1, 4, 90), pytest.param(3, 6, 95, marks=pytest.mark.long)]
)
def test_accuracy_of_the_digits_example(lab, seeds, epochs, accuracy):
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", "2", "--num-replicas", "4"),
        *("--only-output-from-instance", "0", "--output", "plain", PROGRAM, seeds, epochs),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["none"] > accuracy
    # Of the 357 images of each seed, two may be told apart otherwise.
    for compression in ("fp16", "bf16", "powersgd"):
        assert abs(found[compression] - found["none"]) <= 0.6 / seeds, found
