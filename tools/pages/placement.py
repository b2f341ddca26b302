"""The pictures of docs/placement.md and docs/index.md, and the blocks of text on the former.

The machine of all of them is tests/support/launcher/snapshots/example.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from poprun_py import LaunchConfig, plan
from poprun_py.machines.host_list import parse_host_list
from poprun_py.machines.machine import Machine
from poprun_py.planning.cpu_placement import place
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.views.host_tables import hardware_table
from poprun_py.planning.views.plan_pictures import plan_svg
from poprun_py.planning.views.plan_text import core_map, topology_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "placement.md"
MACHINE = ROOT / "tests" / "support" / "launcher" / "snapshots" / "example.json"
BLOCK = re.compile(r"<!-- (table|domains|picture: [^>]+) -->\n```text\n(.*?)```\n", re.DOTALL)
# What each picture in docs shows.
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
}


def picture(name: str) -> str:
    """Return the picture in a file as SVG."""
    config = LaunchConfig(hardware=str(MACHINE), **JOBS[name])
    return plan_svg(plan(config, environ={}, mpi=Mpi(path="mpirun", kind=OPEN_MPI_5))) + "\n"


def block(what: str) -> str:
    """Return the text of a block of the page by its mark."""
    machine = Machine.from_json(json.loads(MACHINE.read_text(encoding="utf-8")))
    if what == "table":
        return hardware_table(machine)
    if what == "domains":
        config = LaunchConfig(num_replicas=8, ipus_per_replica=16, num_instances=4)
        return topology_table(make_topology(config, parse_host_list("h0,h1", source="the page")))
    mode, count, *options = what.removeprefix("picture: ").split()
    values = {name: int(value) for name, value in (option.split("=") for option in options)}
    config = LaunchConfig(process_placement=mode, **values)
    return core_map(machine, dict(enumerate(place(machine, int(count), config))))


def files() -> dict[Path, str]:
    """Return the page and the pictures by their files."""
    page = PAGE.read_text(encoding="utf-8")
    page = BLOCK.sub(lambda m: f"<!-- {m[1]} -->\n```text\n{block(m[1])}\n```\n", page)
    return {PAGE: page, **{PAGE.with_name(name): picture(name) for name in JOBS}}
