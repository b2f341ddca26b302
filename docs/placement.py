"""Draws docs/placement.svg, the picture of docs/placement.md: ``python docs/placement.py``.

The machine is that of the other pictures of the page, tests/support/snapshots/example.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from poprun_py import LaunchConfig, plan  # noqa: E402
from poprun_py.planning.mpi_commands import OPEN_MPI_5, Mpi  # noqa: E402
from poprun_py.views.plan_picture import plan_picture  # noqa: E402

PICTURE = ROOT / "docs" / "placement.svg"
MACHINE = ROOT / "tests" / "support" / "snapshots" / "example.json"


def picture() -> str:
    """Return the picture as SVG."""
    config = LaunchConfig(
        num_instances=3,
        num_replicas=6,
        ipus_per_replica=2,
        process_placement="packnuma",
        cores_per_instance=9,
        hardware=str(MACHINE),
    )
    return plan_picture(plan(config, environ={}, mpi=Mpi(path="mpirun", kind=OPEN_MPI_5))) + "\n"


def main(words: Sequence[str]) -> None:
    """Write the file."""
    if words:
        raise SystemExit("usage: python docs/placement.py")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
