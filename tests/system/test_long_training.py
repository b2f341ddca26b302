"""A long training grows by nothing: memory, descriptors, threads, shared memory, log, step time.

SOAK_SECONDS (3600) or SOAK_STEPS (200000), whichever is reached first, ends the long one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.mpi]
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "long_run.py"
# Of a process: what its allocators may take once more after they have warmed up.
GROWTH_BYTES, GROWTH_SHARE = 2 << 20, 0.02
SLOWER = 1.05
LINE_BYTES = 120
# Launcher, mpirun, and two instances with what stands in front of them.
PROCESSES = ["in front of the program"] * 2 + ["launcher", "mpirun"] + ["program"] * 2


def train(poprun, seconds: float, steps: int):
    """Run the training and return its figures; none of its processes may be left."""
    name, _, value = poprun.marker.partition("=")
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--json", f"--seconds={seconds}", f"--steps={steps}"],
        stdout=subprocess.PIPE,
        env={**os.environ, name: value},
        check=True,
    )
    return json.loads(done.stdout)


def check_growth(figures) -> None:
    """Compare what each process held after its start with what it held before its end."""
    processes = figures["processes"]
    assert sorted(each["process"] for each in processes) == PROCESSES
    for each in processes:
        for name in ("private_bytes", "shared_bytes"):
            start, end = each[name]
            assert end - start < GROWTH_BYTES + GROWTH_SHARE * start, each
        for name in ("descriptors", "threads"):
            start, end = each[name]
            assert end <= start, each
    assert figures["left_in_shared_memory"] == []
    assert figures["bytes_of_log_per_line"] < LINE_BYTES, "the screen's log has grown"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_training_holds_no_more_at_its_end_than_after_its_start(poprun):
    # Long enough for the launcher to have looked at the instances, each second, before its "start".
    figures = train(poprun, 8, 100_000)
    check_growth(figures)
    first, second = figures["instances"]
    assert first["steps"] == second["steps"]


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_an_hour_of_training_grows_by_nothing_and_stays_as_fast(poprun):
    seconds = float(os.environ.get("SOAK_SECONDS", "3600"))
    figures = train(poprun, seconds, int(os.environ.get("SOAK_STEPS", "200000")))
    print(json.dumps(figures))
    check_growth(figures)
    for instance in figures["instances"]:
        start, end = instance["fast_us"]
        # Load on the machine that comes or goes moves either; a training that gets slower, both.
        assert min(end / start, instance["end/start"]) <= SLOWER, instance
