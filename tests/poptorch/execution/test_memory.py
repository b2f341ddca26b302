"""Long training holds no more memory than short training."""

from __future__ import annotations

import subprocess
import sys

import pytest

# One small tensor kept per step would be some 5 MB.
ALLOWED_BYTES = 2_000_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_steps_hold_what_a_thousand_hold():
    """In a fresh interpreter: memory that other tests gave back would hide a leak."""
    program = (
        "from poptorch.execution import test_memory as test\n"
        "kept = [test.growth('auto', test.by_hand), test.growth('loop', test.through_a_loader)]\n"
        "print(*(added for _, added in kept))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_hand_added, loader_added = map(int, done.stdout.split())
    assert by_hand_added < ALLOWED_BYTES
    assert loader_added < ALLOWED_BYTES
