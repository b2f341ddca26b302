"""Long training holds no more memory than short training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("long_training.py")
# One small tensor kept per step would be some 5 MB.
ALLOWED_BYTES = 2_000_000


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("execution", "batches"), [("auto", "by hand"), ("loop", "loader")])
def test_ten_thousand_steps_hold_what_a_thousand_hold(execution, batches):
    """In a fresh interpreter: memory that other tests gave back would hide a leak."""
    done = subprocess.run(
        [sys.executable, PROGRAM, execution, batches],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < ALLOWED_BYTES
