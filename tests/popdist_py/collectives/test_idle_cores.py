"""Waiting instances leave the cores to working instances."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# The test limits the CPU time. A busy machine adds some CPU time to every wake-up.
pytestmark = [pytest.mark.mpi, pytest.mark.sweep]


@pytest.mark.parametrize("instances", [2, 8])
def test_waiting_takes_no_core(poprun, instances):
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe",
        Path(__file__).with_name("waiting_program.py"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used = {
        int(index): float(cpu)
        for index, cpu in re.findall(r"\[1,(\d+)\]<stdout>:([\d.]+) ", done.stdout)
    }
    assert len(used) == instances
    assert used.pop(0) > 0.99
    # With a busy loop, each waiting instance would use its share of the second or more.
    assert max(used.values()) < 0.5, used
