"""Draws the pictures of docs/placement.md and docs/index.md: ``python docs/placement.py``.

The machine is that of the other pictures there, tests/support/snapshots/example.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from poprun_py import LaunchConfig, plan  # noqa: E402
from poprun_py.planning.mpi_commands import OPEN_MPI_5, Mpi  # noqa: E402
from poprun_py.views.plan_picture import plan_picture  # noqa: E402

MACHINE = ROOT / "tests" / "support" / "snapshots" / "example.json"
# What each file of this folder shows.
JOBS: dict[str, dict[str, Any]] = {
    "main-job.svg": {
        "num_instances": 2,
        "num_replicas": 8,
        "cores_per_instance": 8,
    },
    "placement.svg": {
        "num_instances": 3,
        "num_replicas": 6,
        "ipus_per_replica": 2,
        "process_placement": "packnuma",
        "cores_per_instance": 9,
    },
    "domains.svg": {
        "num_instances": 128,
        "num_replicas": 256,
        "host": "pod[00-63]",
    },
}


def picture(name: str) -> str:
    """Return the picture in a file as SVG."""
    config = LaunchConfig(hardware=str(MACHINE), **JOBS[name])
    return plan_picture(plan(config, environ={}, mpi=Mpi(path="mpirun", kind=OPEN_MPI_5))) + "\n"


def main(words: Sequence[str]) -> None:
    """Write the files."""
    if words:
        raise SystemExit("usage: python docs/placement.py")
    for name in JOBS:
        (ROOT / "docs" / name).write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
