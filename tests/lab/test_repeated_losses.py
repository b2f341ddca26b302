"""A training on four hosts that loses something every few seconds ends with the same weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.repository import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


def test_a_training_with_losses_ends_with_the_weights_of_an_undisturbed_one(
    lab_permitted, tmp_path
):
    path = tmp_path / "record.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tools.soak.repeated_losses", "--steps", "120"),
            *("--every", "2", "--losses", "3", "--kinds", "instance|wrapper|1 s"),
            *("--json", path),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line for line in lines[1:] if line["line"] == "loss"]
    assert 1 <= len(losses) <= 3
    assert max(line["again"] for line in losses) <= 1
    part = next(line for line in lines[1:] if line["line"] == "part")
    assert not part["left"]
