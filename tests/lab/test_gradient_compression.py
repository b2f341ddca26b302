"""Compressed gradients between hosts: the digits example learns what it learns without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("accuracy_program.py")


def test_accuracy_of_the_digits_example(lab):
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", "2", "--num-replicas", "4"),
        *("--only-output-from-instance", "0", "--output", "plain", PROGRAM, "3", "6"),
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["none"] > 95
    # Of 357 images and three seeds, 0.2 points are two images.
    for compression in ("fp16", "bf16", "powersgd"):
        assert abs(found[compression] - found["none"]) <= 0.2, found
