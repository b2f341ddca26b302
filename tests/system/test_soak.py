"""A hundred random faults in a row, each with its exit code, report, survivors and time.

SOAK_FAULTS sets how many, SOAK_SEED which.
"""

from __future__ import annotations

import os
import random

import pytest
from support.faults import FAULTS, fail_at, measure_calmly

pytestmark = [pytest.mark.mpi, pytest.mark.soak, pytest.mark.timeout(3600)]

CODES = {
    "exit": 3, "os_exit": 9, "exception": 1, "segv": 139, "kill": 137, "abort": 134, "term": 143,
    "memory_error": 1,
}  # fmt: skip


def random_fault(dice: random.Random):
    """Return a fault of the table, or an instance, step and way to fail drawn at random."""
    from support.faults import Fault

    if dice.random() < 0.3:
        return dice.choice(FAULTS)
    instance, step, how = dice.randrange(2), dice.randrange(0, 40), dice.choice(sorted(CODES))
    env = fail_at(instance, step, how)
    for name in ("PLAIN", "CHILDREN"):
        if dice.random() < 0.3:
            env[name] = "1"
    return Fault(
        title=f"{how} in instance {instance} at step {step} {env}", code=CODES[how], env=env,
        named=instance, seconds=3,
    )  # fmt: skip


def test_random_faults(tmp_path):
    seed = int(os.environ.get("SOAK_SEED", "1"))
    dice = random.Random(seed)
    failures = []
    for number in range(int(os.environ.get("SOAK_FAULTS", "100"))):
        fault = random_fault(dice)
        seen, wrong = measure_calmly(fault, tmp_path / str(number))
        if wrong:
            failures.append(f"{number} {fault.title}: {', '.join(wrong)}\n{seen.stderr}")
    assert not failures, f"seed {seed}\n" + "\n".join(failures)
