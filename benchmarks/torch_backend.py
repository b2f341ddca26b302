"""torch.distributed over the back end popdist, beside gloo: single collectives.

It starts its instances with poprun-py, as a user's job is started, on several hosts where --host
names them. They may then use all cores of their host, as under torchrun: gloo has threads of its
own, and is up to five times slower where they share one core with the program. ``popdist/gloo`` is
how many times faster than gloo ours is.

Usage: python benchmarks/torch_backend.py [--json] [--instances 2 4] [--host A,B] [--turns 9]
    [--collectives all_reduce ...] [--sizes 4096 ...] [--modes sync async]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch_collectives
from show_rows import rows_of_job, show_rows

MODES = ("sync", "async")


def work(arguments: argparse.Namespace) -> None:
    """Measure as one of the instances; instance 0 prints a line for every row."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rows = torch_collectives.rows(
        arguments.collectives, arguments.sizes, arguments.turns, arguments.modes
    )
    for row in rows:
        if os.environ["RANK"] == "0":
            print(json.dumps(row), flush=True)


def launch(instances: int, host: str, options: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Run one job and yield its rows."""
    placed = ["--num-instances", instances, "--num-replicas", instances, "--oversubscribe"]
    placed += ["--host", host] if host else []
    return rows_of_job(["poprun_py", *placed, __file__, "--worker", *options])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--host", default="", help="as poprun-py takes it")
    parser.add_argument("--turns", type=int, default=9)
    collectives = torch_collectives.COLLECTIVES
    parser.add_argument("--collectives", nargs="+", choices=collectives, default=collectives)
    sizes = torch_collectives.SIZES
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="bytes")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    options = ["--turns", arguments.turns]
    for name in ("collectives", "sizes", "modes"):
        options += [f"--{name}", *getattr(arguments, name)]
    rows = (
        row
        for instances in arguments.instances
        for row in launch(instances, arguments.host, options)
    )
    show_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
