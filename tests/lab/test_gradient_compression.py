"""Compressed gradients between hosts: the digits example learns what it learns without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("accuracy_program.py")


# Seeds and epochs, the accuracy that they come to, and the compressions. Hosts exchange bfloat16 in
# the same way as float16, so that only the long test has both.
@pytest.mark.parametrize(
    ("seeds", "epochs", "accuracy", "compressions"),
    [
        (1, 4, 90, ["fp16", "powersgd"]),
        pytest.param(3, 6, 95, ["fp16", "bf16", "powersgd"], marks=pytest.mark.long),
    ],
)
def test_accuracy_of_the_digits_example(lab, seeds, epochs, accuracy, compressions):
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", "2", "--num-replicas", "4"),
        *("--only-output-from-instance", "0", "--output", "plain", PROGRAM, seeds, epochs),
        *("none", *compressions),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["none"] > accuracy
    # Of the 357 images of each seed, two may be told apart otherwise.
    for compression in compressions:
        assert abs(found[compression] - found["none"]) <= 0.6 / seeds, found
